"""Computes log-probs (and entropies) of completion tokens from hidden states; no other logits are computed.

It replaces one method of mcore-bridge's GPTModel, `_forward_output_layer(hidden_states, weight=..., ...)`, on the
instance, inside the context `log_prob_head`. The rows that predict a trained token are selected, and then

* if the model's logits are a plain matrix product, fused.py computes the rest;
* otherwise (a model that caps its logits, an adapter on the output layer) the rows go through the model's own output
  layer chunk by chunk, and each chunk's logits are discarded and recomputed in backward.

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
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from swift_megatron_grpo.packing.collate import ModelInputs
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.training.head.fused import Head, fused_log_probs, rows_per_chunk
from swift_megatron_grpo.training.head.row_statistics import RowStats, Vocabulary
from swift_megatron_grpo.training.head.softmax import stats_of_rows, to_gradient_


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of the log-prob head."""

    temperature: float
    entropy: bool  # compute entropies as well
    chunk: int | None = None  # rows whose logits exist at one time; None: see rows_per_chunk


@contextmanager
def log_prob_head(
    model: GPTModel, inputs: ModelInputs, settings: HeadSettings, parallel: RankPosition
) -> Iterator[None]:
    """Inside the context the model's forward returns [1, k, 1 or 2] fp32: log-probs and, on request, entropies."""
    project = model._forward_output_layer  # the method of the model's class, with soft caps and the like

    def head(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = _rows(hidden, inputs.head_positions, model, parallel)  # [k, h]
        if logits_are_a_plain_product(model, project):
            values = _fused(
                model, rows, inputs.head_targets, tied=kwargs["weight"], settings=settings, parallel=parallel
            )
        else:
            values = _through_the_model(
                model,
                lambda chunk: project(chunk, *args, **kwargs),
                rows,
                inputs.head_targets,
                settings=settings,
                parallel=parallel,
            )
        return values[:, None]  # _postprocess turns [k, 1, x] into [1, k, x]

    with replaced(model, "_forward_output_layer", head):
        yield


def logits_are_a_plain_product(model: GPTModel, project: Callable[..., torch.Tensor]) -> bool:
    """Return True if `project` computes hidden @ weight^T and nothing else.

    That excludes a soft cap or scale of the model's class, an adapter, a bias, hooks that read the logits, and a weight
    gradient that Megatron computes later.
    """
    layer = model.output_layer
    return (
        project == GPTModel._forward_output_layer.__get__(model)
        and type(layer) is ColumnParallelLinear
        and layer.bias is None
        and not layer.gather_output
        and not layer._forward_hooks
        and not model.config.defer_embedding_wgrad_compute
    )


def _rows(hidden: torch.Tensor, positions: torch.Tensor, model: GPTModel, parallel: RankPosition) -> torch.Tensor:
    """Select the rows that predict a trained token: [l or l / TP, 1, h] -> [k, h].

    Backward adds up the gradients of tensor-parallel ranks here, once.
    """
    if parallel.tp_size > 1:
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, positions)


def _fused(
    model: GPTModel,
    rows: torch.Tensor,
    targets: torch.Tensor,
    tied: torch.Tensor | None,  # the embedding's weight, if the output layer shares it
    settings: HeadSettings,
    parallel: RankPosition,
) -> torch.Tensor:
    layer = model.output_layer
    weight = layer.weight if tied is None else tied
    vocabulary = _vocabulary(len(weight), model.config.padded_vocab_size, settings, parallel)
    head = Head(vocabulary, settings.entropy, _chunk(rows, len(weight), settings))

    # Called as a module, because DDP waits for gathered weights in a hook of the layer (overlap_param_gather).
    with replaced(layer, "forward", lambda rows: fused_log_probs(rows, weight, targets, head)):
        values: torch.Tensor = layer(rows)
    return values


def _through_the_model(
    model: GPTModel,
    project: Callable[[torch.Tensor], torch.Tensor],  # [c, 1, h] -> [c, 1, v]
    rows: torch.Tensor,
    targets: torch.Tensor,
    settings: HeadSettings,
    parallel: RankPosition,
) -> torch.Tensor:
    """Compute [k, h] -> [k, 1 or 2] with the model's own output layer; only the results of a chunk are kept."""

    def chunk_values(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with _local_output_layer(model):
            logits = project(rows[:, None])[:, 0]  # [c, v]
        return vocab_parallel_log_probs(logits, targets, settings, model.config.padded_vocab_size, parallel)

    size = _chunk(rows, model.output_layer.output_size_per_partition, settings)
    chunks = [
        checkpoint(chunk_values, r, t, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else chunk_values(r, t)
        for r, t in zip(rows.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(chunks)


@contextmanager
def _local_output_layer(model: GPTModel) -> Iterator[None]:
    """Turn off the output layer's communication, which `_rows` has done for all chunks at once."""
    layers = [module for module in model.output_layer.modules() if isinstance(module, ColumnParallelLinear)]
    saved = [(layer.sequence_parallel, layer.explicit_expert_comm) for layer in layers]
    for layer in layers:
        layer.sequence_parallel = False
        layer.explicit_expert_comm = True
    try:
        yield
    finally:
        for layer, (sequence_parallel, explicit_expert_comm) in zip(layers, saved, strict=True):
            layer.sequence_parallel = sequence_parallel
            layer.explicit_expert_comm = explicit_expert_comm


def vocab_parallel_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, settings: HeadSettings, vocab_size: int, parallel: RankPosition
) -> torch.Tensor:
    """Compute [k, 1 or 2] fp32 from the logits of this rank's part of the vocabulary, [k, v], and targets, [k]."""
    vocabulary = _vocabulary(logits.shape[1], vocab_size, settings, parallel)
    result: torch.Tensor = _LogProbs.apply(logits.contiguous(), targets, vocabulary, settings.entropy)
    return result


def _vocabulary(columns: int, vocab_size: int, settings: HeadSettings, parallel: RankPosition) -> Vocabulary:
    first = parallel.tp_rank * columns
    real = min(columns, max(0, vocab_size - first))  # the rest pads the vocabulary for TP and is ignored
    return Vocabulary(first, real, settings.temperature, parallel.tp_group if parallel.tp_size > 1 else None)


def _chunk(rows: torch.Tensor, columns: int, settings: HeadSettings) -> int:
    return settings.chunk or rows_per_chunk(len(rows), columns, rows.dtype, rows.is_cuda)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool
    ) -> torch.Tensor:
        stats = stats_of_rows(logits, targets, vocabulary, entropy)
        ctx.save_for_backward(logits, targets, stats.logprob, stats.peak, stats.log_total, stats.entropy)
        ctx.vocabulary = vocabulary
        return stats.columns()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, *saved = ctx.saved_tensors
        return to_gradient_(logits.clone(), targets, RowStats(*saved), grad, ctx.vocabulary), None, None, None


class _GatherCompletion(torch.autograd.Function):
    """Gathers this rank's k values into all m of the micro batch, in order.

    Every context-parallel rank then computes the same loss and propagates only the gradient of its own values; the sum
    over ranks is the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, inputs: ModelInputs, parallel: RankPosition) -> torch.Tensor:
        widest = max(inputs.cp_counts)
        padded = values.new_zeros(widest, values.shape[1])
        padded[: values.shape[0]] = values
        gathered = [torch.empty_like(padded) for _ in inputs.cp_counts]
        dist.all_gather(gathered, padded, group=parallel.cp_group)
        ctx.order = inputs.cp_order
        ctx.begin = sum(inputs.cp_counts[: parallel.cp_rank])
        ctx.length = values.shape[0]
        joined = torch.cat([part[:count] for part, count in zip(gathered, inputs.cp_counts, strict=True)])
        return joined.index_select(0, inputs.cp_order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        joined = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        return joined[ctx.begin : ctx.begin + ctx.length], None, None


def gather_completion(values: torch.Tensor, inputs: ModelInputs, parallel: RankPosition) -> torch.Tensor:
    """Gather [k, x] of this context-parallel rank into [m, x] of the micro batch."""
    if parallel.cp_size == 1:
        return values
    result: torch.Tensor = _GatherCompletion.apply(values, inputs, parallel)
    return result
