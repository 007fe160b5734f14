"""Loss, gradient norm and the weights after two steps are those of one rank, for every layout, in fp32 to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_megatron_grpo.tools.check_layouts import compare, task
from tests.dist.conftest import LAYOUTS, TUNERS, Ranks

pytestmark = pytest.mark.dist
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize(("kind", "tuner", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_a_layout_computes_what_one_rank_computes(ranks: Ranks, kind: str, tuner: str, layout: str) -> None:
    found = compare(layout, ranks.layouts(kind, tuner, layout))
    assert found.loss <= 1e-6 and found.grad_norm <= 1e-6 and found.weights <= 1e-6


@pytest.mark.parametrize("tuner", TUNERS)
def test_there_was_something_to_compare(ranks: Ranks, tuner: str) -> None:
    first, second = json.loads(Path(ranks.layouts("dense", tuner), "one.json").read_text())["metrics"]
    assert first["actor/approxkl"] == 0 and first["actor/clipfrac"] == 0  # on-policy: the ratio is 1
    assert second["actor/approxkl"] > 0 and second["kl"] > 0  # off-policy, and away from the reference
    assert first["grad_norm"] > 0.05  # so it was clipped: a wrong norm would show in the weights


@pytest.mark.parametrize(
    ("number", "layouts"),
    [(1, ["mbs1", "mbs4", "tokens48", "tokens96"]), (2, ["tp2", "pp2", "cp2", "dp2"]), (4, ["tp2+pp2", "tp2+cp2"] * 2)],
)
def test_no_layout_leaves_its_threads_to_the_next(ranks: Ranks, number: int, layouts: list[str]) -> None:
    """gloo starts 60 threads and more for a layout that is not torn down, and they wake a hundred times a second."""
    ranks.layouts("dense", "full")
    tasks = []
    for index, layout in enumerate(layouts):
        out = str(ranks.folder / f"threads-{number}-{index}")
        tasks += [ranks.layout_task("dense", "full", layout), task("tests.dist.engine_runs:threads", out=out)]
    ranks.run(f"threads-{number}", number, tasks)
    for rank in range(number):
        counts = [ranks.report(f"threads-{number}-{index}", rank)["threads"] for index in range(len(layouts))]
        assert counts[-1] - counts[0] < 10 * (len(layouts) - 1) and counts[-1] < 300, counts
