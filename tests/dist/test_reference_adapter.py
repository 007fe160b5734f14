"""The reference of --ref_adapters is the model with that adapter, and the trained adapter does not notice."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import task
from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], marks=pytest.mark.thorough),
        ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"],
    ],
)
def test_the_reference_is_the_model_with_its_own_adapter(ranks: Ranks, layout: list[str]) -> None:
    number, other = 2 if layout else 1, str(ranks.folder / "other-adapter")
    flags = ranks.flags("dense-shallow", "lora", "float32", ["--beta", "0.1"])
    make = "swift_megatron_grpo.cli.check_layouts.ranks:make_adapter"
    ranks.run("other-adapter", 1, [task(make, flags=[*flags, "--seed", "7"], adapter=other)])  # with another lora_A
    adapters = {"policy": ranks.adapter("dense-shallow"), "reference": other}
    ranks.call(f"reference-adapter-{number}", "reference_adapter:main", number, [*flags, *layout], **adapters)
    report = ranks.report(f"reference-adapter-{number}", 0)
    assert largest_difference(report["reference"], report["expected"]) < 2e-6
    assert largest_difference(report["reference_after"], report["expected"]) < 2e-6
    assert largest_difference(report["policy"], report["expected"]) > 1e-3
    assert report["same_export"] and report["export_moved"] and report["same_trained"]
    assert report["trained_of_reference"] == []


def largest_difference(some: dict[str, list[float]], others: dict[str, list[float]]) -> float:
    return max(abs(a - b) for i in others for a, b in zip(some[i], others[i], strict=True))
