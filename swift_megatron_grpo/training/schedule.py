"""Megatron's pipeline schedule over the packed micro batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from mcore_bridge import unwrap_model
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, ModelInputs
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.training.head.logprob import HeadSettings, gather_completion, log_prob_head
from swift_megatron_grpo.training.layers.shared_prompts import packed_params
from swift_megatron_grpo.training.loss import TokenOutput
from swift_megatron_grpo.training.moe.router_replay import PassRouters
from swift_megatron_grpo.training.vision_tower import is_composite, language_model

# Reduces the output of a micro batch to (the scalar that backward starts from, the value that the caller keeps).
Reduce = Callable[[MicroBatch, TokenOutput], tuple[torch.Tensor, Any]]


def run(
    models: Sequence[MegatronModule],  # one per virtual pipeline stage of this rank
    micro_batches: Callable[[], Iterator[MicroBatch]],
    count: int,
    head: HeadSettings,
    reduce: Reduce,
    parallel: RankPosition,
    train: bool,
    routers: PassRouters | None = None,
) -> list[Any]:
    """Run forward, and backward if `train`, over all micro batches of this rank.

    `routers`: None if routers choose and nothing is recorded. Returns the values that `reduce` kept, one per micro
    batch, on the last pipeline stage; [] on the other stages.
    """

    def forward_step(iterator: Iterator[MicroBatch], model: MegatronModule) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        output = _forward(model, batch.inputs, head, parallel, routers)
        return output, partial(_on_completion, reduce, batch, parallel)

    interleaved = len(models) > 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[micro_batches() for _ in models] if interleaved else micro_batches(),
        model=list(models) if interleaved else models[0],
        num_microbatches=count,
        seq_length=1,  # placeholder: stage_shapes.py has the shapes of all micro batches (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not train,
    )
    return results


def _forward(
    model: MegatronModule, inputs: ModelInputs, head: HeadSettings, parallel: RankPosition, routers: PassRouters | None
) -> torch.Tensor:
    """Return the hidden states for the next stage or, on the last stage, [1, k, 1 or 2] log-probs and entropies."""
    unwrapped = unwrap_model([model])[0]
    routing = nullcontext() if routers is None else routers.forward(unwrapped, inputs.routing)
    with log_prob_head(language_model(unwrapped), inputs, head, parallel), routing:
        output: torch.Tensor = model(
            input_ids=inputs.packed_ids if is_composite(unwrapped) else inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=packed_params(inputs),
            **({} if inputs.images is None else {"packed_images": inputs.images}),
        )
    return output


def _on_completion(
    reduce: Reduce, batch: MicroBatch, parallel: RankPosition, output: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    values = gather_completion(output[0], batch.inputs, parallel)  # [m, 1 or 2]
    entropy = values[:, 1] if values.shape[1] == 2 else None
    return reduce(batch, TokenOutput(logprobs=values[:, 0], entropy=entropy))
