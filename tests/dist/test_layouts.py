"""Loss, gradient norm and the weights after two steps match one rank for every layout, in fp32 to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_layouts.command import compare
from swift_megatron_grpo.cli.check_layouts.layouts import task
from tests.dist.conftest import LAYOUTS, RUN_LAYOUT, TUNERS, Ranks, selected_layouts
from tests.support.choice import covering, rest_nightly

pytestmark = pytest.mark.dist
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]
MARKED = rest_nightly(CASES, covering(CASES, also=[("dense", "lora", "tp2+sp")]))  # which splits adapters


@pytest.fixture(scope="module")
def finished(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """Run the selected layouts, all of one number of ranks in the same processes: starting them takes as long again."""
    ranks.all_layouts("layouts", selected_layouts(request))
    return ranks


@pytest.mark.parametrize(("kind", "tuner", "layout"), MARKED, ids=["-".join(case) for case in CASES])
def test_a_layout_matches_one_rank(finished: Ranks, kind: str, tuner: str, layout: str) -> None:
    difference = compare(layout, str(finished.folder / f"{kind}-{tuner}"))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6


@pytest.mark.parametrize("tuner", TUNERS)
def test_the_compared_steps_are_not_trivial(ranks: Ranks, tuner: str) -> None:
    first, second = json.loads(Path(ranks.layouts("dense", tuner), "one.json").read_text())["metrics"]
    assert first["actor/approxkl"] == 0 and first["actor/clipfrac"] == 0  # on-policy: the ratio is 1
    assert second["actor/approxkl"] > 0 and second["kl"] > 0  # off-policy, and away from the reference
    assert first["grad_norm"] > 0.05  # large enough to be clipped: a wrong norm would show in the weights


def test_a_process_can_train_with_one_attention_backend_after_another(ranks: Ranks) -> None:
    tasks = []
    for backend in ("fused", "flash"):
        folder = ranks.folder / f"{backend}-attention"
        folder.mkdir()
        flags = ranks.flags("dense", "full", "float32", ["--attention_backend", backend])
        tasks.append(task(RUN_LAYOUT, name="one", flags=flags, batches=["on-policy"], folder=str(folder)))
    ranks.run("attention-backends", 1, tasks)
    assert (ranks.folder / "flash-attention" / "one.json").exists()


@pytest.mark.parametrize(
    ("number", "layouts"),
    [
        pytest.param(1, ["mbs1", "mbs4", "tokens48", "tokens96"], marks=pytest.mark.nightly),
        (2, ["tp2", "pp2", "cp2", "dp2"]),
        pytest.param(4, ["tp2+pp2", "tp2+cp2", "tp2+pp2"], marks=pytest.mark.nightly),
    ],
)
def test_the_threads_of_a_layout_end_with_it(ranks: Ranks, number: int, layouts: list[str]) -> None:
    """gloo starts 40 threads or more per layout, which stay if it is not torn down."""
    (folder := ranks.folder / f"threads-{number}").mkdir()
    arguments = {"flags": ranks.layout_flags("dense", "full"), "batches": ["on-policy"], "folder": str(folder)}
    tasks = []
    for index, layout in enumerate(layouts):
        out = str(ranks.folder / f"threads-{number}-{index}")
        tasks += [task(RUN_LAYOUT, name=layout, **arguments), task("tests.programs.dist.engine_runs:threads", out=out)]
    ranks.run(f"threads-{number}", number, tasks)
    for rank in range(number):
        counts = [ranks.report(f"threads-{number}-{index}", rank)["threads"] for index in range(len(layouts))]
        assert counts[-1] - counts[0] < 10 * (len(layouts) - 1) and counts[-1] < 300, counts
