"""The estimate of a checkpoint's size counts every weight once, on any layout."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks

LAYOUTS = {
    "tied-pp2": ("tied", "full", "--pipeline_model_parallel_size 2"),
    "lora-tp2": ("dense", "lora", "--tensor_model_parallel_size 2 --sequence_parallel true"),
    "moe-ep2": ("moe", "full", "--expert_model_parallel_size 2"),
    "moe-tp2": ("moe", "full", "--tensor_model_parallel_size 2 --sequence_parallel true"),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_counts_once(ranks: Ranks, layout: str) -> None:
    kind, tuner, extra = LAYOUTS[layout]
    ranks.call(f"size-{layout}", "checkpoint_size:main", 2, ranks.flags(kind, tuner, "bfloat16", extra.split()))
    reports = [ranks.report(f"size-{layout}", rank) for rank in (0, 1)]
    exported = max(report["weights"] for report in reports)
    # Megatron has one matrix A for q, k, v, and one for gate, up; an export has one for each of the five
    weights = exported - (4 * (2 + 1) * 64 * 8 if tuner == "lora" else 0)
    total = {name: sum(report["shares"][name] for report in reports) for name in reports[0]["shares"]}
    assert total["weights"] == pytest.approx(2 * weights, rel=1e-6)  # bf16
    assert total["kept"] == 2 * 100
    assert total["all"] == pytest.approx((2 * 2 + 12) * weights, rel=1e-6)
    if tuner == "lora":
        assert total["merged"] > 5 * total["weights"]
    else:
        assert total["merged"] == pytest.approx(total["weights"])
