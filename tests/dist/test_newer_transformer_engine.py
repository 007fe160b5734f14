"""Transformer Engine 2.13 and newer leave experts unmarked, and the gradient norm counts all of them nevertheless."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core import __version__
from packaging.version import Version

from swift_megatron_grpo.cli.check_layouts.command import Difference, compare
from swift_megatron_grpo.cli.check_layouts.layouts import Variant, task
from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist


def difference(ranks: Ranks, layout: str, fixed: bool) -> Difference:
    folder = ranks.folder / f"newer-transformer-engine-{fixed}"
    folder.mkdir(exist_ok=True)
    for name in ("one", layout):
        arguments = {"name": name, "flags": ranks.layout_flags("moe", "full"), "batches": ["on-policy", "off-policy"]}
        run = task(
            "tests.programs.dist.newer_transformer_engine:run_layout", **arguments, folder=str(folder), fixed=fixed
        )
        ranks.run(f"{folder.name}-{name}", Variant.parse(name).ranks, [run])
    assert Path(folder, "one.json").exists()
    return compare(layout, str(folder))


@pytest.mark.parametrize("layout", ["tp2+sp", pytest.param("tp2+sp+etp2", marks=pytest.mark.thorough)])
def test_a_layout_matches_one_rank(ranks: Ranks, layout: str) -> None:
    found = difference(ranks, layout, fixed=True)
    assert found.loss <= 1e-6 and found.grad_norm <= 1e-6 and found.weights <= 1e-6


def test_megatron_below_0_19_would_leave_experts_out(ranks: Ranks) -> None:
    off = difference(ranks, "tp2+sp", fixed=False).grad_norm
    assert (off > 1e-5) is (Version(__version__) < Version("0.19"))
