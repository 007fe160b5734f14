"""A given routing has the same effect on every layout, and a recorded pass is replayed bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.command import compare
from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from tests.dist.conftest import Ranks, selected
from tests.support.choice import covering, rest_nightly

pytestmark = pytest.mark.dist
LAYOUTS = {
    "full": ["mbs4", "tokens96", "recompute", "selective_moe", "tp2+sp", "cp2", "pp2", "pp2+vpp2+recompute", "pp2+vpp2",
             "dp2+ep2", "tp2+sp+ep2", "tp2+sp+etp2"],
    "lora": ["recompute", "tp2+sp"],  # on the routers, too; scripts/test.sh runs these on other versions of Megatron
}  # fmt: skip
CASES = [(tuner, layout) for tuner, layouts in LAYOUTS.items() for layout in layouts]
WITH_ONE = [(tuner, layout) for tuner, layouts in LAYOUTS.items() for layout in ("one", *layouts)]
CHOSEN = covering(CASES, also=[("lora", layout) for layout in LAYOUTS["lora"]])
LAYOUT = pytest.mark.parametrize(
    ("tuner", "layout"), rest_nightly(CASES, CHOSEN), ids=["-".join(case) for case in CASES]
)
LAYOUT_OR_ONE = pytest.mark.parametrize(
    ("tuner", "layout"),
    rest_nightly(WITH_ONE, [*CHOSEN, ("full", "one"), ("lora", "one")]),
    ids=["-".join(case) for case in WITH_ONE],
)


@pytest.fixture(scope="module")
def folders(ranks: Ranks, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Run the selected layouts, and one rank, of each tuner."""
    cases = selected(request, "tuner", "layout")
    chosen = {tuner: [layout for of, layout in cases if of == tuner and layout != "one"] for tuner, _ in cases}
    return {tuner: ranks.routing_layouts(["one", *layouts], tuner) for tuner, layouts in chosen.items()}


@pytest.fixture
def folder(folders: dict[str, Path], tuner: str) -> Path:
    return folders[tuner]


def recorded(folder: Path, layout: str) -> list[dict[str, Any]]:
    return [
        torch.load(folder / f"{layout}.recorded.{rank}.pt", weights_only=False)
        for rank in range(Variant.parse(layout).ranks)
    ]


@LAYOUT
def test_a_given_routing_has_the_same_effect_on_every_layout(folder: Path, layout: str) -> None:
    difference = compare(layout, str(folder))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6


@LAYOUT_OR_ONE
def test_a_recorded_pass_is_replayed_bit_by_bit(folder: Path, layout: str) -> None:
    for rank in recorded(folder, layout):
        assert rank["replayed"] == rank["logprobs"]
        assert set(rank["rows"]) == set(rank["kept"]) == set(rank["same"])
        for index, rows in rank["rows"].items():
            assert np.array_equal(rank["same"][index], rows)


@LAYOUT_OR_ONE
def test_replay_holds_the_experts_when_routers_have_moved(folder: Path, layout: str) -> None:
    for rank in recorded(folder, layout):
        for index, rows in rank["rows"].items():
            assert np.array_equal(rank["kept"][index], rows)
            assert (np.sort(rank["own"][index]) != np.sort(rows)).any(-1).mean() > 0.2


@LAYOUT
def test_every_layout_records_the_experts_of_one_rank(folder: Path, layout: str) -> None:
    [one] = recorded(folder, "one")
    whole = {index: np.full_like(rows, -1) for index, rows in one["rows"].items()}
    for rank in recorded(folder, layout):
        for index, rows in rank["rows"].items():
            whole[index] = np.maximum(whole[index], rows)
    agreed = [(np.sort(whole[index]) == np.sort(rows)).all(-1) for index, rows in one["rows"].items()]
    assert np.concatenate([rows.ravel() for rows in agreed]).mean() > 0.998  # two experts may be equally good
