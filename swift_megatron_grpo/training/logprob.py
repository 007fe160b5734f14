"""Hidden states -> log-probability (and entropy) of the completion tokens, without the logits of anything else.

The seam is one method of mcore-bridge's GPTModel: `_forward_output_layer(hidden_states, weight=..., ...)`. While
`log_prob_head` is open it is replaced on the instance: the rows that predict a trained token are picked, go through the
model's own output layer chunk by chunk, and each chunk's logits are forgotten and computed again in backward.

l: tokens this rank holds after sequence parallelism is undone; k: rows that predict a trained token;
v: vocabulary of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch.utils.checkpoint import checkpoint

from swift_megatron_grpo.packing.collate import ModelInputs
from swift_megatron_grpo.parallel import Parallel


@dataclass(frozen=True, slots=True)
class HeadSettings:
    temperature: float
    entropy: bool  # compute entropies as well
    chunk: int = 4096  # rows whose logits exist at one time


@contextmanager
def log_prob_head(model: GPTModel, inputs: ModelInputs, settings: HeadSettings, parallel: Parallel) -> Iterator[None]:
    """Inside, the model's forward returns [1, k, 1 or 2]: log-probs and, on request, entropies, in fp32."""
    project = model._forward_output_layer  # the class's own, with soft caps and the like

    def head(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = _rows(hidden, inputs.head_positions, model, parallel)  # [k, h]

        def chunk_values(chunk: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with _local_output_layer(model):
                logits = project(chunk[:, None], *args, **kwargs)[:, 0]  # [chunk, v]
            return vocab_parallel_log_probs(logits, targets, settings, model.config.padded_vocab_size, parallel)

        values = _in_chunks(chunk_values, rows, inputs.head_targets, settings)
        return values[:, None]  # _postprocess turns [k, 1, x] into [1, k, x]

    model._forward_output_layer = head
    try:
        yield
    finally:
        del model._forward_output_layer


def _rows(hidden: torch.Tensor, positions: torch.Tensor, model: GPTModel, parallel: Parallel) -> torch.Tensor:
    """[l or l / TP, 1, h] -> [k, h]. Each tensor-parallel rank adds its part of the gradient here, once."""
    if parallel.tp_size > 1:
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, positions)


def _in_chunks(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    targets: torch.Tensor,
    settings: HeadSettings,
) -> torch.Tensor:
    """[k, h] -> [k, 1 or 2]; nothing of a chunk but its result outlives it."""
    chunks = [
        checkpoint(function, r, t, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else function(r, t)
        for r, t in zip(rows.split(settings.chunk), targets.split(settings.chunk), strict=True)
    ]
    return torch.cat(chunks)


@contextmanager
def _local_output_layer(model: GPTModel) -> Iterator[None]:
    """The output layer as a plain matrix product: `_rows` has done its communication for all chunks at once."""
    layers = [module for module in model.output_layer.modules() if isinstance(module, ColumnParallelLinear)]
    saved = [(layer.sequence_parallel, layer.explicit_expert_comm) for layer in layers]
    for layer in layers:
        layer.sequence_parallel, layer.explicit_expert_comm = False, True
    try:
        yield
    finally:
        for layer, (sequence_parallel, explicit_expert_comm) in zip(layers, saved, strict=True):
            layer.sequence_parallel, layer.explicit_expert_comm = sequence_parallel, explicit_expert_comm


def vocab_parallel_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, settings: HeadSettings, vocab_size: int, parallel: Parallel
) -> torch.Tensor:
    """[k, v] logits of this rank's part of the vocabulary, [k] targets -> [k, 1 or 2] fp32."""
    first = parallel.tp_rank * logits.shape[1]
    group = parallel.tp_group if parallel.tp_size > 1 else None
    real = min(logits.shape[1], max(0, vocab_size - first))  # rows that only pad the vocabulary for TP have no say
    result: torch.Tensor = _LogProbs.apply(logits, targets, first, real, settings.temperature, settings.entropy, group)
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        real: int,
        temperature: float,
        entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        scores = logits.float()  # [k, v]; a copy unless the model runs in fp32
        scores = scores / temperature
        scores[:, real:] = -torch.inf
        peak = scores.amax(-1)  # [k]
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        scores -= peak[:, None]

        local = targets - first
        owned = (local >= 0) & (local < logits.shape[1])
        index = local.clamp(0, logits.shape[1] - 1)
        target_score = scores.gather(1, index[:, None])[:, 0].masked_fill(~owned, 0.0)

        weights = scores.exp()
        sums = [target_score, weights.sum(-1)]
        if entropy:
            sums.append((weights * scores.clamp(min=-1e30)).sum(-1))  # a weight of 0 contributes 0, not 0 * inf
        total = torch.stack(sums)  # [2 or 3, k]
        if group is not None:
            dist.all_reduce(total, group=group)
        log_z = total[1].log()
        columns = [total[0] - log_z]
        if entropy:
            columns.append(log_z - total[2] / total[1])

        probs = weights.div_(total[1][:, None])
        ctx.save_for_backward(probs, index, owned, columns[1] if entropy else None)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return torch.stack(columns, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        probs, index, owned, entropy = ctx.saved_tensors
        # d logp[t] / d score[j] = (j == t) - p[j];  d H / d score[j] = -p[j] * (log p[j] + H)
        grad_scores = probs * -grad[:, :1]
        grad_scores.scatter_add_(1, index[:, None], (grad[:, 0] * owned)[:, None])
        if entropy is not None:
            # p log p is 0 where p is 0
            log_probs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
            grad_scores -= grad[:, 1:] * probs * (log_probs + entropy[:, None])
        return (grad_scores / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None


class _GatherCompletion(torch.autograd.Function):
    """This rank's k values -> all m of the micro batch, in order. Every context-parallel rank then computes the same
    loss, and sends back the gradient of its own values only: the sum over ranks is the whole gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, inputs: ModelInputs, parallel: Parallel) -> torch.Tensor:
        widest = max(inputs.cp_counts)
        padded = values.new_zeros(widest, values.shape[1])
        padded[: values.shape[0]] = values
        parts = [torch.empty_like(padded) for _ in inputs.cp_counts]
        dist.all_gather(parts, padded, group=parallel.cp_group)
        ctx.order, ctx.begin, ctx.length = inputs.cp_order, sum(inputs.cp_counts[: parallel.cp_rank]), values.shape[0]
        joined = torch.cat([part[:count] for part, count in zip(parts, inputs.cp_counts, strict=True)])
        return joined.index_select(0, inputs.cp_order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        joined = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        return joined[ctx.begin : ctx.begin + ctx.length], None, None


def gather_completion(values: torch.Tensor, inputs: ModelInputs, parallel: Parallel) -> torch.Tensor:
    """[k, x] of this context-parallel rank -> [m, x] of the micro batch."""
    if parallel.cp_size == 1:
        return values
    result: torch.Tensor = _GatherCompletion.apply(values, inputs, parallel)
    return result
