"""The work of stages is compared with sums by hand, and the layers of the last stage with all other numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.throughput import EvenStages, StepWork, bubble, even_stages, fullest_stage
from swift_megatron_grpo.settings.layout import Layout

DECODER = Decoder(8, 64, 64, 64, 128, 256, False)
WORK = StepWork(1e15, 2e14, tokens=8192, completion_tokens=4096)  # the head takes as much as two layers
TWO = Layout(2, pipeline_model_parallel_size=2)


def test_the_last_stage_has_the_head() -> None:
    assert fullest_stage(WORK, DECODER, Layout(4, pipeline_model_parallel_size=4)) == pytest.approx((2 + 2) / (10 / 4))
    assert fullest_stage(WORK, DECODER, replace(TWO, last_stage_layers=3)) == pytest.approx(1)
    assert fullest_stage(WORK, DECODER, Layout(4)) == 1


def test_a_virtual_pipeline_waits_for_smaller_parts() -> None:
    sizes = dict(pipeline_model_parallel_size=4)
    assert bubble(Layout(4, **sizes), 6) == 2 * bubble(Layout(4, virtual_pipeline_model_parallel_size=2, **sizes), 6)
    assert bubble(Layout(4), 6) == 0


def test_the_last_stage_gets_fewer_layers_beside_the_head() -> None:
    even = even_stages(WORK, DECODER, TWO, lambda layout: True)
    assert even == EvenStages(3, pytest.approx(1.2), pytest.approx(1))  # type: ignore[arg-type]


def test_the_best_of_the_allowed_layouts_is_proposed() -> None:
    """The head takes as much as four of eight layers; with one layer, the last stage has 5, and the first one 7."""
    work = replace(WORK, head_flops=WORK.training_flops / 3)
    even = even_stages(work, DECODER, TWO, lambda layout: layout.last_stage_layers in (1, 4))
    assert even == EvenStages(1, pytest.approx(8 / 6), pytest.approx(7 / 6))  # type: ignore[arg-type]
    assert even_stages(work, DECODER, TWO, lambda layout: False) is None


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        replace(TWO, last_stage_layers=4),
        replace(TWO, first_stage_layers=4),
        replace(TWO, stages="Etttt|ttttL"),
        replace(TWO, extra_layers=2),
    ],
)
def test_stages_that_flags_have_chosen_are_kept(layout: Layout) -> None:
    assert even_stages(WORK, DECODER, layout, lambda layout: True) is None


def test_a_small_head_needs_no_flag() -> None:
    assert even_stages(replace(WORK, head_flops=2e13), DECODER, TWO, lambda layout: True) is None
