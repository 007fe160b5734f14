"""Flags that Muon cannot have are refused by name; the same flags with another optimizer are not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from swift_megatron_grpo.settings.layout import ModelShape
from swift_megatron_grpo.settings.muon import Muon
from tests.unit.settings.flags import faults

SHAPE = ModelShape("m", 4, 2, 128, 2, None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"overlap_grad_reduce": True}, "use --overlap_grad_reduce false, or --optimizer adam"),
        ({"overlap_param_gather": True}, "use --overlap_param_gather false, or --optimizer adam"),
        ({"use_precision_aware_optimizer": True}, "use --use_precision_aware_optimizer false, or --optimizer adam"),
        ({"optimizer_cpu_offload": True}, "use --optimizer_cpu_offload false, or --optimizer adam"),
        ({"tensor_model_parallel_size": 2}, "--tensor_model_parallel_size 2.*use --muon_tp_mode duplicated"),
        ({"expert_tensor_parallel_size": 2}, "--expert_tensor_parallel_size 2.*use --muon_tp_mode duplicated"),
    ],
)
def test_flags_that_muon_excludes(flags: dict[str, Any], message: str) -> None:
    muon: dict[str, Any] = {"optimizer": "muon", "muon_tp_mode": "blockwise"}
    assert faults(Muon, **muon) == faults(Muon, **flags | {"optimizer": "adam", "muon_tp_mode": "blockwise"}) == ""
    assert re.search(message, faults(Muon, **muon | flags))


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_whole_matrices_may_be_sharded(mode: str) -> None:
    assert faults(Muon, optimizer="muon", muon_tp_mode=mode, tensor_model_parallel_size=2) == ""


def test_a_projection_with_a_gate_is_not_split() -> None:
    gated = replace(SHAPE, linear_heads=(2,))
    assert "use --muon_split_qkv false" in faults(Muon, gated, optimizer="muon", muon_split_qkv=True)
    assert faults(Muon, gated, optimizer="muon", muon_split_qkv=False) == ""
    assert faults(Muon, SHAPE, optimizer="muon", muon_split_qkv=True) == ""
