"""The weighted SwiGLU without a GPU: in Triton's interpreter, and compiled. On a GPU: tests/gpu/test_kernels.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.training.layers.fast_kernels import _weighs_swiglu
from tests.forking.client import python


def run(arguments: list[str], **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    pytest.importorskip("triton")
    done = python("-m", "tests.unit.training.weighted_swiglu_cases", *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_the_kernels_match_fp64_and_megatron_in_the_interpreter() -> None:
    assert run([], TRITON_INTERPRET="1").endswith(" cases")


def test_the_kernels_compile_for_a_gpu_whatever_the_number_of_rows(tmp_path: Path) -> None:
    assert run(["compile"], TRITON_CACHE_DIR=str(tmp_path)) == "compiled"


EXPERTS = {
    "num_moe_experts": 8,
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "bias_activation_fusion": True,
    "activation_func_fp8_input_store": False,
}


@pytest.mark.parametrize(
    ("changed", "replaced"),
    [
        ({}, True),
        ({"num_moe_experts": None}, False),
        ({"activation_func": F.gelu}, False),
        ({"activation_func": torch.nn.functional.relu, "gated_linear_unit": False}, False),
        ({"bias_activation_fusion": False}, False),
        ({"activation_func_fp8_input_store": True}, False),
    ],
    ids=lambda value: "-".join(value) or "experts" if isinstance(value, dict) else str(value),
)
def test_the_kernels_are_for_models_that_call_megatrons_weighted_swiglu(
    changed: dict[str, Any], replaced: bool
) -> None:
    assert _weighs_swiglu(SimpleNamespace(**EXPERTS | changed)) is replaced
