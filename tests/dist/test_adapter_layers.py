"""Layers whose adapters add in place train like those of mcore-bridge, wherever they are installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.conftest import Ranks
from tests.support.choice import rest_nightly

pytestmark = pytest.mark.dist
FULL = ["--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"]
RUNS = {
    "dense": (1, ["--micro_batch_size", "4"], {"added"}),
    "qwen2_5_vl": (1, [], {"added", "with bias"}),
    "dense overlap": (2, ["--overlap_grad_reduce", "true"], {"returned"}),
    "dense recompute": (1, FULL, {"added", "no gradient"}),
    "dense pp2 cp2": (4, ["--pipeline_model_parallel_size", "2", "--context_parallel_size", "2"], {"added"}),
    "dense tp2": (2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"], set()),
    "dense dropout": (1, ["--lora_dropout", "0.1"], set()),
    "qwen3_5": (1, [], {"added"}),
    "moe ep2": (2, ["--expert_model_parallel_size", "2"], {"added", "experts"}),
}

CHOSEN = [name for name in RUNS if name not in ("dense pp2 cp2", "qwen3_5")]


def run(ranks: Ranks, name: str, fast: bool) -> list[dict[str, Any]]:
    number, flags, _ = RUNS[name]
    label = f"adapters-{name.replace(' ', '-')}-{fast}"
    model = name.split()[0]
    kind = f"{model}-shallow" if model in ("dense", "moe") else model
    # A new adapter has dropout; one that is loaded has that of its own settings.
    base = ranks.flags(kind, "lora", "float32") if "dropout" in name else ranks.layout_flags(kind, "lora")
    extra = [*base, *flags, "--fast_kernels", str(fast).lower()]
    ranks.call(label, "adapter_runs:two_steps", number, extra)
    return [ranks.report(label, rank) for rank in range(number)]


@pytest.mark.parametrize("name", rest_nightly(list(RUNS), CHOSEN))
def test_products_with_adapters_in_them_train_like_separate_ones(ranks: Ranks, name: str) -> None:
    together, separate = run(ranks, name, fast=True), run(ranks, name, fast=False)
    for found, expected in zip(together, separate, strict=True):
        assert set(found["ways"]) == RUNS[name][2] and not expected["ways"]
        for step, expected_step in zip(found["metrics"], expected["metrics"], strict=True):
            assert step["loss"] == pytest.approx(expected_step["loss"], abs=1e-6)
            assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-5)
        assert found["squares"] == pytest.approx(expected["squares"], rel=1e-6)
