"""LoRA is merged into the exported weights only; the base weights do not change."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "layout", "flags_are_on"),
    [
        ("dense", ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"], "cpu"),
        pytest.param("moe", ["--expert_model_parallel_size", "2"], "cpu", marks=pytest.mark.thorough),
        pytest.param("dense", ["--pipeline_model_parallel_size", "2"], "cuda", marks=pytest.mark.nightly),
    ],
)
def test_twenty_exports_leave_the_base_bit_identical(
    ranks: Ranks, kind: str, layout: list[str], flags_are_on: str
) -> None:
    name, flags = f"export-{kind}-{flags_are_on}", ranks.flags(kind, "lora", "bfloat16", layout)
    ranks.call(name, "lora_export:main", 2, flags, kind=kind)
    for rank in (0, 1):
        report = ranks.report(name, rank)
        assert report["exports"] == 20 and report["base_tensors"] > 15
        assert report["changed"] == []
        assert report["worst"] < 5e-3  # against base + B A * alpha / r in fp64: one rounding to bf16
        assert flags_of_layers(report["flags"]) == flags_are_on


def flags_of_layers(count: dict[str, int]) -> str:
    """Return where the flags of layers are made: on the host unless ranks have to agree on them.

    Those of the embedding, the last norm and the head are made on the GPU in any case.
    """
    outside_layers = 3
    assert sum(count.values()) > 4 * 7  # mcore-bridge still asks for each weight of each layer
    return "cpu" if count["cuda"] <= outside_layers else "cuda" if count["cpu"] == 0 else "both"
