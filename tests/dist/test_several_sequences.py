"""Completions of several sequences train like their conversations in one sequence, on every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.command import compare
from swift_megatron_grpo.cli.check_layouts.layouts import Task, Variant, task
from tests.dist.conftest import DESCENT, LEARNING_RATE, Ranks, selected_layouts
from tests.dist.test_gradients import torch_weights
from tests.forking.client import run_script
from tests.paths import PROGRAMS
from tests.support.choice import covering, rest_nightly

pytestmark = pytest.mark.dist
LAYOUTS = {
    ("dense", "full"): ["tokens400+shared", "tp2+sp+mbs4+shared", "pp2+mbs4+shared", "pp2+vpp2+mbs1", "dp2+mbs1",
                        "dp2+tokens400+shared", "cp2+mbs4"],
    ("dense", "lora"): ["mbs4+shared", "tp2+sp+tokens400+shared"],
    ("moe", "full"): ["dp2+ep2+mbs4"],
}  # fmt: skip
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]
CHOSEN = covering(CASES)
_RUN = "tests.programs.dist.sequence_runs:run_layout"


@pytest.fixture(scope="module")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> dict[tuple[str, str], Path]:
    folders, tasks = {}, dict[int, list[Task]]()
    for (kind, tuner), names in selected_layouts(request).items():
        folder = folders[kind, tuner] = ranks.folder / f"{kind}-{tuner}-sequences"
        folder.mkdir()
        flags = ranks.layout_flags(kind, tuner)
        for name in ("one", *names):
            tasks.setdefault(Variant.parse(name).ranks, []).append(
                task(_RUN, name=name, flags=flags, folder=str(folder))
            )
    ranks.run_each("sequences", tasks)
    return folders


@pytest.mark.parametrize(
    ("kind", "tuner", "layout"), rest_nightly(CASES, CHOSEN), ids=["-".join(case) for case in CASES]
)
def test_sequences_of_a_conversation_train_like_the_whole_of_it(
    runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str
) -> None:
    folder = runs[kind, tuner]
    difference = compare(layout, str(folder))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6
    one, other = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", layout))
    assert other["sequences"] > one["sequences"] > 8  # of eight completions
    assert other["rate_steps"] == one["rate_steps"] == 16  # the learning rate counts completions
    assert other["metrics"][0]["actor/approxkl"] == 0 and other["metrics"][1]["actor/clipfrac"] > 0
    ranks = Variant.parse(layout).ranks
    counts = [json.loads((folder / f"{layout}.counts.{rank}").read_text()) for rank in range(ranks)]
    assert {int(index) for of_rank in counts for index in of_rank} == set(range(other["sequences"]))


@pytest.mark.parametrize(
    ("kind", "tuner", "layout"),
    rest_nightly(*([case for case in cases if "shared" in case[2]] for cases in (CASES, CHOSEN))),
)
def test_what_sequences_have_in_common_is_trained_once(
    runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str
) -> None:
    run = json.loads((runs[kind, tuner] / f"{layout}.json").read_text())
    share = 1 / Variant.parse(layout).sizes.get("dp", 1)
    assert run["packed"] < (0.8 if "mbs4" in layout else 0.65) * share * run["tokens"]


def test_gradients_of_sequences_match_plain_transformers_in_fp64(ranks: Ranks, tmp_path: Path) -> None:
    model = ranks.model("dense")
    flags = ranks.flags("dense", "full", "float32", DESCENT)
    ranks.run("sequences-descent", 1, [task(_RUN.replace("run_layout", "descent"), flags=flags, folder=str(tmp_path))])
    run = json.loads((tmp_path / "sequences.json").read_text())
    run_script(PROGRAMS / "dist" / "hf_gradients.py", model, tmp_path / "hf.pt", "sequences")
    reference, moved, start = torch.load(tmp_path / "hf.pt"), torch.load(run["weights"]), torch_weights(model)
    assert run["metrics"][0]["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    for of_run, of_reference in zip(run["logprobs"], reference["logprobs"], strict=True):
        assert of_run == pytest.approx(of_reference, abs=2e-6)
    for name, expected in reference["grads"].items():
        gradient = (start[name].double() - moved[name].double()) / LEARNING_RATE
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name
