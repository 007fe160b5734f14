"""Gradients and results are copied to the same places as by Megatron, whose weights come out bit for bit."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks

CASES = {
    "full": ("dense", "full", ["--beta", "0.1"]),
    "experts": ("moe", "lora", ["--beta", "0.1", "--target_modules", "all-linear", "--moe_grouped_gemm", "true"]),
    "expert parallel": ("moe", "full", ["--beta", "0.1", "--expert_model_parallel_size", "2"]),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", list(CASES))
def test_steps_equal_those_with_megatrons_copies(ranks: Ranks, case: str) -> None:
    kind, tuner, extra = CASES[case]
    job = f"copies-{case.replace(' ', '-')}"
    ranks.call(job, "optimizer_copies:main", 2, ranks.flags(kind, tuner, "bfloat16", extra))
    for rank in (0, 1):
        report = ranks.report(job, rank)
        assert report["metrics_equal"] == [True, True, True]
        assert report["weights_differ"] == [] and report["moved_by_training"] > 0
        assert report["copied_in_one_call"] > 10
