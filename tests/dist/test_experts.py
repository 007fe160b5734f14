"""One product for all experts trains like a product for each, and takes the shortest way to Megatron's gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.conftest import Ranks
from tests.support.choice import rest_nightly

pytestmark = pytest.mark.dist
RUNS = {
    "full": (1, ["--micro_batch_size", "4"], {"added"}),
    "full dp2 ep2": (2, ["--expert_model_parallel_size", "2"], {"added"}),
    "full dp2 overlap": (2, ["--overlap_grad_reduce", "true"], {"returned"}),
    "full plain optimizer": (1, ["--use_distributed_optimizer", "false"], {"added"}),
    "full recompute": (
        1,
        ["--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"],
        {"added", "no gradient"},
    ),
    "lora": (1, ["--micro_batch_size", "4"], {"added", "frozen"}),
    "lora tp2": (2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"], {"added", "frozen"}),
}

CHOSEN = ["full dp2 ep2", "full dp2 overlap", "full recompute", "lora tp2"]


def run(ranks: Ranks, name: str, fast: bool) -> list[dict[str, Any]]:
    number, flags, _ = RUNS[name]
    label = f"experts-{name.replace(' ', '-')}-{fast}"
    tuner = name.split()[0]
    extra = [*flags, "--fast_kernels", str(fast).lower()]
    ranks.call(label, "expert_runs:two_steps", number, ranks.flags("moe-shallow", tuner, "float32", extra))
    return [ranks.report(label, rank) for rank in range(number)]


@pytest.mark.parametrize("name", rest_nightly(list(RUNS), CHOSEN))
def test_the_product_of_all_experts_trains_like_a_product_for_each(ranks: Ranks, name: str) -> None:
    grouped, each = run(ranks, name, fast=True), run(ranks, name, fast=False)
    for found, expected in zip(grouped, each, strict=True):
        assert set(found["ways"]) == RUNS[name][2] and not expected["ways"]
        for step, expected_step in zip(found["metrics"], expected["metrics"], strict=True):
            assert step["loss"] == pytest.approx(expected_step["loss"], abs=1e-6)
            assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-6)
        assert found["squares"] == pytest.approx(expected["squares"], rel=1e-6)
        # What a checkpoint's manifest says of the order of the optimizer's state
        assert found["ascending"] == [found["experts_in_order"]] == [True]
        assert expected["ascending"] == [expected["experts_in_order"]] == [False]
