"""Computes log-probs (and entropies) of completion tokens from hidden states; no other logits are computed.

It replaces one method of mcore-bridge's GPTModel, `_forward_output_layer(hidden_states, weight=..., ...)`, on the
instance, inside the context `log_prob_head`. The rows that predict a trained token are selected, and then

* if the model's logits are a plain matrix product, fused.py computes the rest;
* otherwise (a model that caps its logits, an adapter on the output layer) the rows go through the model's own output
  layer chunk by chunk, and each chunk's logits are discarded and recomputed in backward.

l: tokens this rank holds after sequence parallelism is undone; k: rows that predict a trained token;
v: vocabulary of this tensor-parallel rank.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def log_prob_head(
    model: GPTModel, inputs: ModelInputs, temperature: float, entropy: bool, parallel: RankPosition
) -> Iterator[None]:
    """Inside the context the model's forward returns [1, k, 1 or 2] fp32: log-probs and, on request, entropies."""
    project = model._forward_output_layer  # the method of the model's class, with soft caps and the like
    targets = inputs.head_targets

    def compute(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = _rows(hidden, inputs.head_positions, model, parallel)  # [k, h]
        head = _head(rows, model, temperature, entropy, parallel)
        if logits_are_a_plain_product(model, project):
            layer = model.output_layer
            weight = layer.weight if kwargs["weight"] is None else kwargs["weight"]  # the embedding's, if it is shared
            # Called as a module, because DDP waits for gathered weights in a hook of the layer (overlap_param_gather).
            with replaced(layer, "forward", lambda rows: fused_log_probs(rows, weight, targets, head)):
                values: torch.Tensor = layer(rows)
        else:
            values = _through_the_model(model, lambda chunk: project(chunk, *args, **kwargs), rows, targets, head)
        return values[:, None]  # _postprocess turns [k, 1, x] into [1, k, x]

    with replaced(model, "_forward_output_layer", compute):
        yield


def frozen_log_probs(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor,
    model: GPTModel,
    temperature: float,
    parallel: RankPosition,
) -> torch.Tensor:
    """Compute log-probs, [k] fp32, with an output layer that is a plain matrix product and gets no gradient.

    `hidden`: [l or l / TP, 1, h], of other layers than the model's own. `positions`, `targets`: [k].
    """
    rows = _rows(hidden, positions, model, parallel)
    shared = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    return fused_log_probs(rows, weight.detach(), targets, _head(rows, model, temperature, False, parallel))[:, 0]


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
    """Select the rows that predict a trained token, [l or l / TP, 1, h] -> [k, h]; backward sums over TP ranks."""
    if parallel.tp_size > 1:
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, positions)


def _head(rows: torch.Tensor, model: GPTModel, temperature: float, entropy: bool, parallel: RankPosition) -> Head:
    columns = model.output_layer.output_size_per_partition
    first = parallel.tp_rank * columns
    real = min(columns, max(0, model.config.padded_vocab_size - first))  # the rest pads it for TP and is ignored
    group = parallel.tp_group if parallel.tp_size > 1 else None
    chunk = rows_per_chunk(len(rows), columns, rows.dtype, rows.is_cuda)
    return Head(Vocabulary(first, real, temperature, group), entropy, chunk)


def _through_the_model(
    model: GPTModel,
    project: Callable[[torch.Tensor], torch.Tensor],  # [c, 1, h] -> [c, 1, v]
    rows: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
) -> torch.Tensor:
    """Compute [k, h] -> [k, 1 or 2] with the model's own output layer; only the results of a chunk are kept."""

    def chunk_values(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with _local_output_layer(model):
            logits = project(rows[:, None])[:, 0]  # [c, v]
        return log_probs_of(logits, targets, head.vocabulary, head.entropy)

    chunks = zip(rows.split(head.chunk), targets.split(head.chunk), strict=True)
    return torch.cat([checkpoint(chunk_values, *of, use_reentrant=False, preserve_rng_state=False) for of in chunks])


@contextmanager
def _local_output_layer(model: GPTModel) -> Iterator[None]:
    """Turn off the output layer's communication, which `_rows` has done for all chunks at once."""
    with ExitStack() as stack:
        for layer in model.output_layer.modules():
            if isinstance(layer, ColumnParallelLinear):
                stack.enter_context(replaced(layer, "sequence_parallel", False))
                stack.enter_context(replaced(layer, "explicit_expert_comm", True))
        yield


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, entropy: bool) -> torch.Tensor:
    """Compute [k, 1 or 2] fp32 from the logits of this rank's part of the vocabulary, [k, v], and targets, [k]."""
    result: torch.Tensor = _LogProbs.apply(logits.contiguous(), targets, vocabulary, entropy)
    return result


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
