"""Estimate how long the ranks of a model copy send activations to each other. Pure Python.

Gradients and pipelines are left out: data parallelism sends gradients once per step, and a pipeline sends one tensor of
a micro batch between stages.
"""

from __future__ import annotations

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.experts import rows_that_leave
from swift_megatron_grpo.cli.estimate.work import PassCounts, StepWork
from swift_megatron_grpo.settings.layout import Layout

# GB that a GPU sends per second to others of its machine, with tensor parallelism. It includes what smaller matrix
# products lose. Two H100 sent 140 of 8B, two H200 240 of 1.7B; four H200 350 of 8B, in micro batches of 65,536 tokens.
TENSOR_GB = 230.0
# The same for rows of experts of 30B-A3B. It includes that ranks wait for the fullest one: four H100 sent 55, four H200
# 140, and more with even routers.
ROWS_GB = 100.0


def seconds_of_exchanges(work: StepWork, decoder: Decoder, layout: Layout, passes: PassCounts, item: int) -> float:
    """Return the seconds in which a rank exchanges activations of `item` bytes a value."""
    between_tensor_ranks = _between_tensor_ranks(work, decoder, layout, passes) / TENSOR_GB
    rows = _between_expert_ranks(work, decoder, layout, passes) / ROWS_GB
    return (between_tensor_ranks + rows) * item / 1e9


def _between_tensor_ranks(work: StepWork, decoder: Decoder, layout: Layout, passes: PassCounts) -> float:
    """Return the values that a rank gathers from its tensor-parallel group, or reduces for it.

    Attention and a dense feed-forward gather their input and reduce their output. Backward does both for the gradients
    and gathers the input once more, as with sequence parallelism. Experts take the tokens as they are divided among
    the ranks, as without --expert_tensor_parallel_size.
    """
    blocks = 2 * decoder.layers - len(decoder.expert_layers)
    rows = work.tokens * blocks * (layout.tensor_model_parallel_size - 1) / layout.world_size
    return rows * decoder.hidden * (2 * passes.forward + 3)


def _between_expert_ranks(work: StepWork, decoder: Decoder, layout: Layout, passes: PassCounts) -> float:
    """Return the values that a rank sends to the experts of other ranks, and sends back to the tokens' ranks."""
    if layout.expert_model_parallel_size == 1 or not decoder.expert_layers:
        return 0.0
    rows = work.tokens * len(decoder.expert_layers) / layout.world_size
    rows *= rows_that_leave(decoder.experts, decoder.experts_per_token, layout.expert_model_parallel_size)
    return rows * decoder.hidden * 2 * (passes.forward + 1)
