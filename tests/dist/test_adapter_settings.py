"""--use_rslora and --lora_dropout take effect under tensor parallelism, with the right masks on every rank."""

from __future__ import annotations

import math

import pytest

from tests.dist.conftest import Ranks

LAYOUTS = {"tp2": ["--sequence_parallel", "false"], "tp2+sp": ["--sequence_parallel", "true"]}
SETTINGS = ["--lora_rank", "16", "--lora_alpha", "32", "--use_rslora", "true", "--lora_dropout", "0.3", "--lr", "1e-3"]


@pytest.mark.dist
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.thorough), "tp2+sp"])
def test_rank_stabilised_adapters_with_dropout(ranks: Ranks, layout: str) -> None:
    flags = ["--tensor_model_parallel_size", "2", *LAYOUTS[layout], *SETTINGS]
    ranks.call(f"settings-{layout}", "adapter_settings:main", 2, ranks.flags("dense", "lora", "float32", flags))
    reports = [ranks.report(f"settings-{layout}", rank) for rank in (0, 1)]
    for report in reports:
        assert report["scalings"] == [32 / math.sqrt(16)] and report["config"]["use_rslora"] is True
        assert report["to_peft"] < 1e-6  # exported weights against base + B A * alpha / sqrt(r) in fp64
        assert report["inference_is_constant"]
        seven, again, eight = *report["masks"]["7"], *report["masks"]["8"]
        assert seven == again != eight
        assert report["losses"][0] != report["losses"][2]
    first, second = (report["masks"]["7"][0] for report in reports)
    assert len(first) == 4
    for name in first:
        replicated = layout == "tp2" and name.endswith(("linear_qkv", "linear_fc1"))
        assert (first[name] == second[name]) is replicated, name
    # one mask for a replicated input, or the copies of an adapter's weights would move apart
    assert reports[0]["replicated"] == pytest.approx(reports[1]["replicated"], rel=1e-6)
    assert len(reports[0]["replicated"]) == 4 * 4
