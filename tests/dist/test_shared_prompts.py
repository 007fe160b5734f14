"""Prompts that completions share have the effect of repeated ones, on every layout that allows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.command import compare
from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from tests.dist.conftest import Ranks, selected_layouts
from tests.support.choice import covering, rest_nightly

pytestmark = pytest.mark.dist
LAYOUTS = {
    ("dense", "full"): ["mbs2+shared", "mbs8+shared", "tokens64+shared", "tokens400+shared", "mbs4+recompute+shared",
                        "mbs4+selective+shared", "tp2+sp+mbs4+shared", "pp2+mbs4+shared",
                        "pp2+vpp2+tokens96+shared", "dp2+mbs4+shared", "dp2+tokens96+shared"],
    ("dense", "lora"): ["mbs4+shared", "tp2+sp+tokens96+shared"],
    ("moe", "full"): ["mbs4+shared", "dp2+ep2+mbs4+shared", "tp2+sp+mbs4+shared"],
}  # fmt: skip
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]
RECORDED = [("moe", "full", layout) for layout in ("mbs4+shared", "tp2+sp+mbs4+shared")]
MARKED = rest_nightly(CASES, covering(CASES, also=RECORDED[:1]))


@pytest.fixture(scope="module")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> dict[tuple[str, str], Path]:
    return {which: ranks.shared_layouts(*which, names) for which, names in selected_layouts(request).items()}


@pytest.mark.parametrize(("kind", "tuner", "layout"), MARKED, ids=["-".join(case) for case in CASES])
def test_shared_prompts_train_as_repeated_ones(
    runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str
) -> None:
    difference = compare(layout, str(runs[kind, tuner]))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6


@pytest.mark.parametrize(("kind", "tuner", "layout"), MARKED, ids=["-".join(case) for case in CASES])
def test_the_ratio_is_exactly_1_on_the_policy_that_generated(
    runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str
) -> None:
    first, second, third = json.loads((runs[kind, tuner] / f"{layout}.json").read_text())["metrics"]
    assert first["actor/approxkl"] == 0 and second["actor/approxkl"] == 0
    assert third["actor/approxkl"] > 0 and third["actor/clipfrac"] > 0  # the comparison is not one of equal policies


@pytest.mark.parametrize(("kind", "tuner", "layout"), MARKED, ids=["-".join(case) for case in CASES])
def test_a_shared_prompt_is_trained_once(runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str) -> None:
    folder, variant = runs[kind, tuner], Variant.parse(layout)
    copies = variant.sizes.get("tp", 1) * variant.sizes.get("pp", 1)
    trained = sum(int((folder / f"{layout}.tokens.{rank}").read_text()) for rank in range(variant.ranks)) / copies
    assert trained < 0.95 * int((folder / "one.tokens.0").read_text())


@pytest.mark.parametrize(("kind", "tuner", "layout"), rest_nightly(RECORDED, RECORDED[:1]))
def test_recorded_experts_of_shared_tokens_are_those_of_every_sample(
    runs: dict[tuple[str, str], Path], kind: str, tuner: str, layout: str
) -> None:
    folder = runs[kind, tuner]
    one, other = (torch.load(folder / f"{name}.rows.0.pt") for name in ("one", layout))
    assert set(one) == set(other) and len(one) == 8
    same = [(one[i].sort(-1).values == other[i].sort(-1).values).all(-1) for i in one]
    assert torch.cat([part.flatten() for part in same]).float().mean() > 0.998  # two experts may be equally good
