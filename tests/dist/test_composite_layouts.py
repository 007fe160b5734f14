"""Composite models and linear attention match one rank on every layout, in fp32, and plain transformers on one rank.

Gradient norms of these models are 10 to 20, with terms that cancel, so they are compared to 1e-5.
"""

from __future__ import annotations

import pytest

from swift_megatron_grpo.tools.check_layouts import compare
from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist
LAYOUTS = {
    ("qwen3_5", "full"): ["tokens64", "tp2", "tp2+sp+recompute", "pp2+vpp2", "cp2", "dp2"],
    ("qwen3_5", "lora"): ["mbs1", "tp2+sp", "pp2"],
    ("qwen3_5-tied", "full"): ["pp2", "dp2+overlap"],
    ("qwen3_5_moe", "full"): ["tp2+sp", "dp2+ep2", "tp2+sp+etp2"],
    ("qwen3_5_moe", "lora"): ["tp2+sp"],
    ("qwen3_next", "full"): ["tp2+sp"],
    ("qwen2_vl", "full"): ["pp2"],
    ("qwen2_5_vl", "full"): ["tp2", "cp2"],
    ("qwen3_vl", "full"): ["tp2+sp", "pp2", "cp2"],
    ("qwen3_vl_moe", "full"): ["dp2+ep2"],
}
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def finished(ranks: Ranks) -> Ranks:
    ranks.all_layouts("composite", LAYOUTS)
    return ranks


@pytest.mark.parametrize(("kind", "tuner", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_a_layout_matches_one_rank(finished: Ranks, kind: str, tuner: str, layout: str) -> None:
    difference = compare(layout, str(finished.folder / f"{kind}-{tuner}"))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-5 and difference.weights <= 1e-6, difference
