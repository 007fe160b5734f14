"""LoRA is merged into what goes out and into nothing else."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_twenty_exports_leave_the_base_bit_identical(ranks: Ranks, kind: str) -> None:
    layout = {
        "dense": ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"],
        "moe": ["--expert_model_parallel_size", "2"],
    }[kind]
    flags = ranks.flags(kind, "lora", "bfloat16", layout)
    ranks.call(f"export-{kind}", "lora_export:main", 2, flags, kind=kind)
    for rank in (0, 1):
        told = ranks.report(f"export-{kind}", rank)
        assert told["exports"] == 20 and told["base_tensors"] > 20
        assert told["changed"] == []
        assert told["worst"] < 5e-3  # against base + B A * alpha / r in fp64: one rounding to bf16
