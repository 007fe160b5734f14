"""Compare the work of pipeline stages: the last one has the output layer. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.parameters import stages_of
from swift_megatron_grpo.cli.estimate.work import StepWork
from swift_megatron_grpo.settings.layout import Layout

_SMALLEST_GAIN = 0.03  # of the mean work of a stage, below which other stages are not worth a flag


@dataclass(frozen=True, slots=True)
class EvenStages:
    """Layers of the last stage that leave less work to the fullest one. Its work is relative to the mean."""

    layers: int
    fullest_before: float
    fullest: float


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
