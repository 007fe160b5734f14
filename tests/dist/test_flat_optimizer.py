"""Steps over runs of parameters give the weights of steps over single ones, bit for bit, and the same checkpoints."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks
from tests.support.choice import rest_nightly

ALL_EXPERTS = ["--beta", "0.1", "--target_modules", "all-linear", "--moe_grouped_gemm", "true"]
LONGER = ["--train_iters", "8"]  # with 2, the learning rate of later steps is 0
# The last bit of the norm may differ, and with it every gradient that is clipped.
UNCLIPPED = ["--clip_grad", "1e6"]
CASES = {
    "adapters": (1, "moe-shallow", "lora", "bfloat16", ALL_EXPERTS),
    "adapters on dp2": (2, "moe-shallow", "lora", "bfloat16", ALL_EXPERTS),
    "adapters on dp2+ep2": (2, "moe-shallow", "lora", "bfloat16", [*ALL_EXPERTS, "--expert_model_parallel_size", "2"]),
    "adapters on tp2": (
        2,
        "moe-shallow",
        "lora",
        "bfloat16",
        [*ALL_EXPERTS, "--tensor_model_parallel_size", "2", "--sequence_parallel", "true"],
    ),
    "all weights on dp2": (2, "dense-shallow", "full", "bfloat16", ["--beta", "0.1"]),
    "all weights on dp2+ep2": (
        2,
        "moe-shallow",
        "full",
        "bfloat16",
        ["--beta", "0.1", "--expert_model_parallel_size", "2"],
    ),
    "all weights in fp32": (1, "dense-shallow", "full", "float32", ["--beta", "0.1"]),
}
CHOSEN = ["all weights on dp2+ep2"]


@pytest.mark.dist
@pytest.mark.parametrize("case", rest_nightly(list(CASES), CHOSEN))
def test_steps_equal_those_over_single_parameters(ranks: Ranks, case: str) -> None:
    count, kind, tuner, dtype, extra = CASES[case]
    job = f"flat-{case.replace(' ', '-')}"
    ranks.call(job, "flat_optimizer:main", count, ranks.flags(kind, tuner, dtype, [*extra, *LONGER, *UNCLIPPED]))
    for rank in range(count):
        report = ranks.report(job, rank)
        # A rank has one buffer, and with expert or tensor parallelism one more of experts.
        assert 0 < report["runs"] <= (2 if tuner == "lora" else report["tensors"] - 1)
        for runs in ("same steps", "a checkpoint of upstream", "a checkpoint of runs"):
            assert report[runs]["losses_equal"] and report[runs]["trained"], report
            assert report[runs]["norms_off"] < 1e-6
            assert report[runs]["weights_differ"] == [], report
