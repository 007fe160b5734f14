"""Estimate how long the phases of a step take, from FLOPs, memory bandwidth and exchanged bytes. Pure Python.

The shares of a GPU's peak below follow runs of docs/performance.md, some of them on several GPUs: one share for dense
models, and two each, without and with adapters, for mixtures of experts and for gated delta nets. They are the same for
every GPU, so the result is a first guess, to see by what factor a layout is too small.

Of exchanges, gradients and pipelines are left out: data parallelism sends gradients once per step, and a pipeline sends
one tensor of a micro batch between stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.parameters import stages_of
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.runtime.gpus import Gpu
from swift_megatron_grpo.settings.layout import Layout

DENSE_SHARE = 0.45  # of peak FLOPs in forward and backward
EXPERTS_SHARE = 0.37  # the same with mixtures of experts, as measured with 64 experts of 4.5B and --fast_kernels
ADAPTED_EXPERTS_SHARE = 0.22  # the same with an adapter on each of 128 experts, as measured with 30B-A3B
DELTA_NETS_SHARE = 0.37  # the same with gated delta nets in three of four layers, as measured with 2B
ADAPTED_DELTA_NETS_SHARE = 0.30
# Of peak bandwidth while vLLM generates, and seconds of its scheduler and launches for one step of all sequences. On
# H200 and H100 steps of 1.7B and 8B with 64 and 128 sequences took 3.5 to 8.5 ms, with CUDA graphs.
BANDWIDTH_SHARE = 0.85
SECONDS_PER_TOKEN = 0.0023
# GB that a GPU sends per second to others of its machine, with tensor parallelism. It includes what smaller matrix
# products lose. Two H100 sent 140 of 8B, two H200 240 of 1.7B; four H200 350 of 8B, in micro batches of 65,536 tokens.
TENSOR_GB = 230.0
# The same for rows of experts of 30B-A3B. It includes that ranks wait for the fullest one: four H100 sent 55, four H200
# 140, and more with even routers.
ROWS_GB = 100.0
_SMALLEST_GAIN = 0.03  # of the mean work of a stage, below which other stages are not worth a flag


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step, on all ranks."""

    training_flops: float  # forward of all samples, once
    head_flops: float  # of these, those of the output layer
    tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The passes of a step over its samples."""

    trains_adapters: bool = False
    recomputes: bool = False  # in backward
    forward_only: int = 0  # for old and reference log-probs

    @property
    def forward(self) -> int:
        return 1 + self.recomputes + self.forward_only


@dataclass(frozen=True, slots=True)
class EvenStages:
    """Layers of the last stage that leave less work to the fullest one. Its work is relative to the mean."""

    layers: int
    fullest_before: float
    fullest: float


def work_of(samples: Sequence[tuple[int, int]], flops: FlopsModel) -> StepWork:
    """Return the work of samples of (tokens, completion tokens)."""
    completion_tokens = sum(completion for _, completion in samples)
    return StepWork(
        training_flops=sum(flops.of_sequence(tokens, completion) for tokens, completion in samples),
        head_flops=flops.per_completion_token * completion_tokens,
        tokens=sum(tokens for tokens, _ in samples),
        completion_tokens=completion_tokens,
    )


def seconds_of_training(
    work: StepWork, gpu: Gpu, decoder: Decoder, layout: Layout, micro_batches: int, passes: PassCounts, item: int
) -> float:
    """Return the seconds of the train phase. `micro_batches`: of a data-parallel rank. `item`: bytes of an activation.

    Backward takes twice the FLOPs of forward, and once where frozen weights need no gradient. Experts and delta nets in
    one model lower the share of peak FLOPs by both factors.
    """
    share = DENSE_SHARE
    if decoder.expert_layers:
        share *= (ADAPTED_EXPERTS_SHARE if passes.trains_adapters else EXPERTS_SHARE) / DENSE_SHARE
    if decoder.delta_layers:
        share *= (ADAPTED_DELTA_NETS_SHARE if passes.trains_adapters else DELTA_NETS_SHARE) / DENSE_SHARE
    factor = passes.forward + (1 if passes.trains_adapters else 2)
    products = work.training_flops * factor / (layout.world_size * gpu.bf16_tflops * 1e12 * share)
    of_a_stage = products + seconds_of_exchanges(work, decoder, layout, passes, item)
    return of_a_stage * (fullest_stage(work, decoder, layout) + bubble(layout, micro_batches))


def seconds_of_generation(gpu: Gpu, steps: int, bytes_of_step: float) -> float:
    """Return the seconds of decoding steps that read so many bytes of weights and cache on each GPU."""
    return steps * (bytes_of_step / (gpu.bandwidth_gb * 1e9 * BANDWIDTH_SHARE) + SECONDS_PER_TOKEN)


def seconds_of_exchanges(work: StepWork, decoder: Decoder, layout: Layout, passes: PassCounts, item: int) -> float:
    """Return the seconds in which a rank exchanges activations of `item` bytes a value.

    Tensor-parallel ranks: attention and a dense feed-forward gather their input and reduce their output. Backward does
    both for the gradients and gathers the input once more, as with sequence parallelism. Experts take the tokens as
    they are divided among the ranks, as without --expert_tensor_parallel_size.
    """
    blocks = 2 * decoder.layers - len(decoder.expert_layers)
    rows = work.tokens * blocks * (layout.tensor_model_parallel_size - 1) / layout.world_size
    seconds = rows * (2 * passes.forward + 3) / TENSOR_GB
    if layout.expert_model_parallel_size > 1 and decoder.experts:  # to experts of other ranks, and back
        rows = work.tokens * len(decoder.expert_layers) / layout.world_size
        rows *= rows_that_leave(decoder.experts, decoder.experts_per_token, layout.expert_model_parallel_size)
        seconds += rows * 2 * (passes.forward + 1) / ROWS_GB
    return seconds * decoder.hidden * item / 1e9


def rows_that_leave(experts: int, taken: int, ranks: int) -> float:
    """Return on how many other ranks a token has experts, of which it takes `taken` at random."""
    none_there = comb(experts - experts // ranks, taken) / comb(experts, taken)
    return (ranks - 1) * (1 - none_there)


def fullest_stage(work: StepWork, decoder: Decoder, layout: Layout) -> float:
    """Return the work of the pipeline's fullest stage, relative to the mean. All layers count the same."""
    stages = stages_of(layout, decoder.layers)
    of_a_layer = (work.training_flops - work.head_flops) / decoder.layers
    flops = [of_a_layer * len(stage.layers) + (work.head_flops if stage.has_head else 0) for stage in stages]
    return max(flops) * len(stages) / work.training_flops


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return how long a stage waits, relative to its work: for the first micro batch and for the last gradients."""
    stages, parts = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    return (stages - 1) / (parts * micro_batches)


def even_stages(
    work: StepWork, decoder: Decoder, layout: Layout, allows: Callable[[Layout], bool]
) -> EvenStages | None:
    """Return the layers of the last stage with which the stages are most even.

    None: they are even enough, or flags have chosen them. `allows`: whether a layout is valid and fits.
    """
    chosen = (layout.first_stage_layers, layout.last_stage_layers, layout.stages) != (None, None, None)
    if layout.pipeline_model_parallel_size == 1 or chosen or layout.extra_layers:
        return None
    before = fullest_stage(work, decoder, layout)
    others = {layers: replace(layout, last_stage_layers=layers) for layers in range(1, decoder.layers)}
    fullest = {layers: fullest_stage(work, decoder, other) for layers, other in others.items()}
    for layers in sorted(others, key=lambda layers: fullest[layers]):
        if before - fullest[layers] < _SMALLEST_GAIN:
            return None
        if allows(others[layers]):
            return EvenStages(layers, before, fullest[layers])
    return None
