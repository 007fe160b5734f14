"""Skips tests of Muon where its package is missing, which needs Python 3.12, or megatron-core does not know it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Without bf16 in the iteration that orthogonalizes, and on whole matrices: then layouts differ by rounding alone.
MUON = ["--optimizer", "muon", "--muon_tp_mode", "duplicated", "--muon_fp32_matmul_prec", "high"]


def _is_missing() -> bool:
    return any(
        find_spec(name) is None for name in ("emerging_optimizers", "megatron.core.optimizer.emerging_optimizers")
    )


needs_muon = pytest.mark.skipif(
    _is_missing(), reason="pip install '.[muon]' with Python 3.12, and megatron-core 0.18 or newer"
)
