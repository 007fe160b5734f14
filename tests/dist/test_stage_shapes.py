"""Stages exchange shapes in the first pass of a kind alone, unless the plan has others or Megatron needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import Task, Variant, task
from swift_megatron_grpo.training.stage_shapes import SENDS_END_BEFORE_MEMORY_IS_FREED
from tests.dist.conftest import Ranks, selected
from tests.support.choice import rest_nightly

LAYOUTS = {2: ["pp2", "pp2+vpp2"], 4: ["pp4", "tp2+sp+pp2", "pp2+cp2", "pp2+vpp2+dp2+tokens64"]}
CASES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
TRAIN_FIRST = [(ranks, f"pp{ranks}") for ranks in LAYOUTS]
CHOSEN = [(2, "pp2"), (2, "pp2+vpp2"), (4, "tp2+sp+pp2")]
LAYOUT = pytest.mark.parametrize(("number", "layout"), rest_nightly(CASES, CHOSEN))
pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Run:
    """Arguments of tests/programs/dist/stage_shapes.py."""

    train: tuple[bool, ...]  # by pass: whether it has backward
    wrong: bool = False  # the plan of the last rank


RUNS = {
    "right": Run(train=(False, True, True, False)),
    "wrong": Run(train=(False, True, True, False), wrong=True),
    "train-first": Run(train=(True, True, False, False)),
}


@pytest.fixture(scope="module")
def finished(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """Run the selected layouts."""
    # Stages that disagree on who exchanges shapes wait for each other for ever without a timeout.
    flags = ranks.flags("dense", "full", "float32", ["--ddp_timeout", "60"])
    tasks: dict[int, list[Task]] = {}
    for number, layout in selected(request, "number", "layout"):
        tasks.setdefault(number, []).extend(
            task(
                "tests.programs.dist.stage_shapes:main",
                out=str(ranks.folder / f"shapes-{layout}-{run}"),
                flags=[*flags, *Variant.parse(layout).flags()],
                **asdict(RUNS[run]),
            )
            for run in runs_of(number, layout)
        )
    ranks.run_each("shapes", tasks)
    return ranks


def reports(finished: Ranks, number: int, layout: str, run: str) -> list[dict[str, Any]]:
    return [finished.report(f"shapes-{layout}-{run}", rank) for rank in range(number)]


def runs_of(number: int, layout: str) -> list[str]:
    return list(RUNS) if (number, layout) in TRAIN_FIRST else ["right", "wrong"]


def needs_exchanges(layout: str) -> bool:
    return "vpp2" in layout and not SENDS_END_BEFORE_MEMORY_IS_FREED


def are_first(train: Sequence[bool]) -> list[bool]:
    """Return for each pass whether it is the first one forward alone, or the first one with backward."""
    return [backward not in train[:number] for number, backward in enumerate(train)]


@LAYOUT
def test_shapes_are_exchanged_in_the_first_pass_alone(finished: Ranks, number: int, layout: str) -> None:
    check_exchanges(reports(finished, number, layout, "right"), RUNS["right"].train, needs_exchanges(layout))


@pytest.mark.parametrize(("number", "layout"), rest_nightly(TRAIN_FIRST, TRAIN_FIRST[:1]))
def test_passes_with_backward_that_come_first_are_compared_alone(finished: Ranks, number: int, layout: str) -> None:
    check_exchanges(reports(finished, number, layout, "train-first"), RUNS["train-first"].train, needed=False)


def check_exchanges(of_ranks: Sequence[dict[str, Any]], train: Sequence[bool], needed: bool) -> None:
    """A pass without gradients decides for such passes alone."""
    for report in of_ranks:
        exchanges = [count > 0 for count in report["exchanged"]]
        assert exchanges == ([True] * len(train) if needed else are_first(train))
        assert report["warnings"] == []


@LAYOUT
def test_the_host_waits_for_the_gpu_in_exchanges_of_shapes_alone(finished: Ranks, number: int, layout: str) -> None:
    """It has no wait in later passes, unless virtual stages need that of the exchange."""
    for run in runs_of(number, layout):
        for report in reports(finished, number, layout, run):
            assert report["waits"] == report["exchanged"]
            assert report["batch_p2p_sync"] is False


@LAYOUT
def test_a_pipeline_with_another_shape_on_one_stage_always_exchanges(finished: Ranks, number: int, layout: str) -> None:
    right, wrong = (reports(finished, number, layout, run) for run in ("right", "wrong"))
    for rank, (with_plan, report) in enumerate(zip(right, wrong, strict=True)):
        assert report["steps"] == with_plan["steps"]
        last = number - 1
        if last in report["pipeline"]:
            assert all(count > 0 for count in report["exchanged"])
        else:  # other pipelines have their own verdict
            assert report["exchanged"] == with_plan["exchanged"]
        logs = rank == last and not needs_exchanges(layout)
        assert len(report["warnings"]) == (2 if logs else 0)  # for each kind of passes
        assert all(f"the pipeline of rank {last} continues to exchange" in warning for warning in report["warnings"])
