"""Estimate how long the phases of a step take, from FLOPs and memory bandwidth. Pure Python.

The shares of a GPU's peak below are those that docs/performance.md has for dense models on one H200. They are the same
for every GPU, so the result is a first guess, to see by what factor a layout is too small.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.planning.activations import Decoder
from swift_megatron_grpo.planning.experts import rows_that_leave
from swift_megatron_grpo.planning.gpus import Gpu

DENSE_SHARE = 0.45  # of peak FLOPs in forward and backward
EXPERTS_SHARE = 0.37  # the same with mixtures of experts, as measured with 64 experts of 4.5B and --fast_kernels
ADAPTED_EXPERTS_SHARE = 0.22  # the same with an adapter on each of 128 experts, as measured with 30B-A3B
BANDWIDTH_SHARE = 0.6  # of peak bandwidth while vLLM generates
EXCHANGED_GB = 150.0  # that a GPU sends per second to others of its node, waiting included, as four H200 with 30B-A3B
SECONDS_PER_TOKEN = 0.0025  # of vLLM's scheduler and launches, for one step of all sequences


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step, on all ranks."""

    training_flops: float  # forward of all samples, once
    tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The work of one vLLM engine for a rollout."""

    sequences: int  # at one time
    waves: float  # how often a sequence follows another one
    steps: int  # tokens of the longest completion
    weight_bytes: float  # that a step reads, on each of its GPUs
    cache_bytes_per_token: float  # keys and values, on each of its GPUs
    mean_length: float  # tokens in the cache of a sequence, on average over time


def seconds_of_training(
    work: StepWork, gpu: Gpu, ranks: int, *, recomputes: bool, trains_adapters: bool, has_experts: bool, passes: int
) -> float:
    """Return the seconds of the train phase. `passes`: forward-only passes for old and reference log-probs.

    Backward takes twice the FLOPs of forward, and once where frozen weights need no gradient.
    """
    factor = 1 + (1 if trains_adapters else 2) + (1 if recomputes else 0) + passes
    share = (ADAPTED_EXPERTS_SHARE if trains_adapters else EXPERTS_SHARE) if has_experts else DENSE_SHARE
    return work.training_flops * factor / (ranks * gpu.bf16_tflops * 1e12 * share)


def seconds_of_exchanges(
    work: StepWork, decoder: Decoder, layout: Layout, *, item: int, recomputes: bool, passes: int
) -> float:
    """Return the seconds in which a rank sends rows to the experts of other ranks, and their results back."""
    if layout.expert_model_parallel_size == 1 or not decoder.expert_layers:
        return 0.0
    rows = work.tokens * len(decoder.expert_layers) / layout.world_size
    rows *= rows_that_leave(decoder.experts, decoder.experts_per_token, layout.expert_model_parallel_size)
    transfers = 2 * (2 + (1 if recomputes else 0) + passes)
    return rows * decoder.hidden * item * transfers / (EXCHANGED_GB * 1e9)


def seconds_of_generation(generation: Generation, gpu: Gpu) -> float:
    """Return the seconds in which one engine generates its share of a rollout."""
    read = generation.weight_bytes + generation.sequences * generation.mean_length * generation.cache_bytes_per_token
    step = read / (gpu.bandwidth_gb * 1e9 * BANDWIDTH_SHARE) + SECONDS_PER_TOKEN
    return generation.waves * generation.steps * step


def work_of(samples: list[tuple[int, int]], flops: FlopsModel) -> StepWork:
    """Return the work of samples of (tokens, completion tokens)."""
    return StepWork(
        training_flops=sum(flops.of_sequence(tokens, completion) for tokens, completion in samples),
        tokens=sum(tokens for tokens, _ in samples),
        completion_tokens=sum(completion for _, completion in samples),
    )
