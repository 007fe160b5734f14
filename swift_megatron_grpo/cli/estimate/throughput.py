"""Estimate how long the phases of a step take, from FLOPs, memory bandwidth and exchanged bytes. Pure Python.

The shares of a GPU's peak below follow runs of docs/performance.md, some of them on several GPUs: one share for dense
models, and two each, without and with adapters, for mixtures of experts and for gated delta nets. They are the same for
every GPU, so the result is a first guess, to see by what factor a layout is too small.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.exchanges import seconds_of_exchanges
from swift_megatron_grpo.cli.estimate.stages import bubble, fullest_stage
from swift_megatron_grpo.cli.estimate.work import PassCounts, StepWork
from swift_megatron_grpo.runtime.gpus import Gpu
from swift_megatron_grpo.settings.layout import Layout

DENSE_SHARE = 0.45  # of peak FLOPs in forward and backward
EXPERTS_SHARE = 0.37  # the same with mixtures of experts, as measured with 64 experts of 4.5B and --fast_kernels
ADAPTED_EXPERTS_SHARE = 0.22  # the same with an adapter on each of 128 experts, as measured with 30B-A3B
DELTA_NETS_SHARE = 0.37  # the same with gated delta nets in three of four layers, as measured with 2B
ADAPTED_DELTA_NETS_SHARE = 0.30
BANDWIDTH_SHARE = 0.6  # of peak bandwidth while vLLM generates
SECONDS_PER_TOKEN = 0.0025  # of vLLM's scheduler and launches, for one step of all sequences


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
    work: StepWork, gpu: Gpu, decoder: Decoder, layout: Layout, micro_batches: int, passes: PassCounts, item: int
) -> float:
    """Return the seconds of the train phase. `micro_batches`: of a data-parallel rank. `item`: bytes of an activation.

    Backward takes twice the FLOPs of forward, and once where frozen weights need no gradient.
    """
    factor = passes.forward + (1 if passes.trains_adapters else 2)
    products = work.training_flops * factor / (layout.world_size * gpu.bf16_tflops * 1e12 * _share(decoder, passes))
    of_a_stage = products + seconds_of_exchanges(work, decoder, layout, passes, item)
    return of_a_stage * (fullest_stage(work, decoder, layout) + bubble(layout, micro_batches))


def seconds_of_generation(generation: Generation, gpu: Gpu) -> float:
    """Return the seconds in which one engine generates its share of a rollout."""
    read = generation.weight_bytes + generation.sequences * generation.mean_length * generation.cache_bytes_per_token
    step = read / (gpu.bandwidth_gb * 1e9 * BANDWIDTH_SHARE) + SECONDS_PER_TOKEN
    return generation.waves * generation.steps * step


def _share(decoder: Decoder, passes: PassCounts) -> float:
    """Return the share of peak FLOPs. Experts and delta nets in one model lower it by both factors."""
    share = DENSE_SHARE
    if decoder.expert_layers:
        share *= (ADAPTED_EXPERTS_SHARE if passes.trains_adapters else EXPERTS_SHARE) / DENSE_SHARE
    if decoder.delta_layers:
        share *= (ADAPTED_DELTA_NETS_SHARE if passes.trains_adapters else DELTA_NETS_SHARE) / DENSE_SHARE
    return share
