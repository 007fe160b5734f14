"""mcore-bridge ignores --use_rslora and --lora_dropout, and megatron_fixes applies them.

The first test fails once upstream reads the settings: see the docstring of adapter_settings.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mcore_bridge.tuners import lora as bridge_lora
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.transformer import TransformerConfig
from peft import LoraConfig
from peft.tuners.lora import model as peft_model

from swift_megatron_grpo.training.upstream_fixes.adapter_settings import (
    AdapterDropout,
    adapter_settings_applied,
    has_adapter_dropout,
)


def adapted_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a layer with an adapter of rank 16, created as peft does, without process groups."""
    monkeypatch.setattr(bridge_lora, "get_tensor_model_parallel_world_size", lambda: 1)
    settings = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, perform_initialization=False, use_cpu_initialization=True
    )
    base = TELinear(
        8, 4, parallel_mode="duplicated", config=settings, init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False,
    )  # fmt: skip
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.3, use_rslora=True)
    return peft_model.dispatch_megatron(base, "default", config=config, r=config.r, lora_alpha=config.lora_alpha)


def test_upstream_ignores_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = adapted_layer(monkeypatch)
    assert layer.scaling["default"] == 32 / 16, "upstream is fixed: see the docstring of adapter_settings.py"
    assert isinstance(layer.lora_dropout["default"], torch.nn.Identity)


def test_the_fix_applies_them_inside_its_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter_settings_applied():
        layer = adapted_layer(monkeypatch)
    assert layer.scaling["default"] == 32 / math.sqrt(16)
    dropout = layer.lora_dropout["default"]
    assert isinstance(dropout, AdapterDropout) and dropout.p == 0.3
    assert has_adapter_dropout([layer]) and not has_adapter_dropout([adapted_layer(monkeypatch)])
    layer.eval()
    x = torch.ones(4, 8)
    assert dropout(x) is x


def test_vllm_scales_such_an_adapter_alike() -> None:
    from vllm.lora.peft_helper import PEFTHelper

    config = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "use_rslora": True, "bias": "none"}
    assert PEFTHelper.from_dict(config).vllm_lora_scaling_factor == 32 / math.sqrt(16)
