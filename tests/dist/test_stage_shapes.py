"""Stages of a pipeline exchange shapes in their first pass alone, unless the plan has others or Megatron needs them."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.tools.check_layouts import Variant, task
from swift_megatron_grpo.training.stage_shapes import sends_end_before_memory_is_freed
from tests.dist.conftest import Ranks

LAYOUTS = {2: ["pp2", "pp2+vpp2"], 4: ["pp4", "tp2+sp+pp2", "pp2+cp2", "pp2+vpp2+dp2+tokens64"]}
CASES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
pytestmark = pytest.mark.dist


def reports(ranks: Ranks, number: int, layout: str, wrong: bool) -> list[dict[str, Any]]:
    run_layouts(ranks, number)
    return [ranks.report(f"shapes-{layout}-{wrong}", rank) for rank in range(number)]


def run_layouts(ranks: Ranks, number: int) -> None:
    tasks = [
        task(
            "tests.dist.stage_shapes:main",
            out=str(ranks.folder / f"shapes-{layout}-{wrong}"),
            flags=[*ranks.flags("dense", "full", "float32"), *Variant.parse(layout).flags()],
            wrong=wrong,
        )
        for layout in LAYOUTS[number]
        for wrong in (False, True)
    ]
    ranks.run(f"shapes-{number}", number, tasks)


@pytest.mark.parametrize(("number", "layout"), CASES)
def test_shapes_are_exchanged_in_the_first_pass_alone(ranks: Ranks, number: int, layout: str) -> None:
    needed = "vpp2" in layout and not sends_end_before_memory_is_freed()
    for report in reports(ranks, number, layout, wrong=False):
        first, *others = report["exchanged"]
        assert first > 0 and (all(count > 0 for count in others) if needed else others == [0, 0])


@pytest.mark.parametrize(("number", "layout"), CASES)
def test_shapes_that_are_not_those_of_the_plan_are_exchanged_in_every_pass(
    ranks: Ranks, number: int, layout: str
) -> None:
    planned, exchanged = (reports(ranks, number, layout, wrong) for wrong in (False, True))
    for with_plan, without in zip(planned, exchanged, strict=True):
        assert all(count > 0 for count in without["exchanged"])
        assert without["steps"] == with_plan["steps"]
