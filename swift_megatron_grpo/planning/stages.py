"""Compare the work of pipeline stages: the last one has the output layer. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.planning.activations import Decoder
from swift_megatron_grpo.planning.parameters import stages_of
from swift_megatron_grpo.planning.work import StepWork

_SMALLEST_GAIN = 0.03  # of the train phase, below which other stages are not worth a flag


def fullest_stage(work: StepWork, decoder: Decoder, layout: Layout) -> float:
    """Return the work of the pipeline's fullest stage, relative to the mean."""
    stages = stages_of(layout, decoder.layers)
    of_a_layer = (work.training_flops - work.head_flops) / decoder.layers
    flops = [of_a_layer * len(stage.layers) + (work.head_flops if stage.has_head else 0) for stage in stages]
    return max(flops) * len(stages) / work.training_flops


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return how long a stage waits, relative to its work: for the first micro batch and for the last gradients."""
    stages, parts = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    return (stages - 1) / (parts * micro_batches)


def with_even_stages(
    work: StepWork, decoder: Decoder, layout: Layout, allows: Callable[[Layout], bool]
) -> Layout | None:
    """Return the layout whose last stage has the number of layers that leaves the least work to the fullest stage.

    None: the stages are even enough, or flags have chosen them. `allows`: whether a layout is valid and fits.
    """
    chosen = (layout.first_stage_layers, layout.last_stage_layers, layout.stages) != (None, None, None)
    if layout.pipeline_model_parallel_size == 1 or chosen or layout.extra_layers:
        return None
    others = [replace(layout, last_stage_layers=layers) for layers in range(1, decoder.layers)]
    best = min(filter(allows, others), key=lambda other: fullest_stage(work, decoder, other), default=layout)
    gain = fullest_stage(work, decoder, layout) - fullest_stage(work, decoder, best)
    return best if gain >= _SMALLEST_GAIN else None
