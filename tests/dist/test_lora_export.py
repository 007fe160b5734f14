"""LoRA is merged into what goes out and into nothing else."""

from __future__ import annotations

import json

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_twenty_exports_leave_the_base_bit_identical(ranks: Ranks, kind: str) -> None:
    for rank in (0, 1):
        told = json.loads(ranks.told(f"export-{kind}", rank).read_text())
        assert told["exports"] == 20 and told["base_tensors"] > 20
        assert told["changed"] == []
        assert told["worst"] < 5e-3  # against base + B A * alpha / r in fp64: one rounding to bf16
