"""Check which layers get torch's flash kernel; tests/gpu/test_torch_attention.py compares what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_megatron_grpo.training.torch_attention import what_is_missing

PLAIN: dict[str, Any] = {
    "context_parallel_size": 1,
    "params_dtype": torch.bfloat16,
    "attention_dropout": 0.0,
    "window_size": None,
    "softmax_type": "vanilla",
}


def missing(key_channels: int = 128, value_channels: int = 128, **changes: Any) -> str | None:
    config: Any = SimpleNamespace(**{**PLAIN, **changes})
    return what_is_missing(config, key_channels, value_channels)


@pytest.mark.parametrize("channels", [64, 128, 256])
def test_plain_layers_are_computed(channels: int) -> None:
    assert missing(channels, channels) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"context_parallel_size": 2}, "--context_parallel_size 2"),
        ({"key_channels": 192}, "192 channels of keys and 128 of values"),
        ({"key_channels": 512, "value_channels": 512}, "256 are the most"),
        ({"params_dtype": torch.float32}, "torch.float32"),
        ({"attention_dropout": 0.1}, "--attention_dropout 0.1"),
        ({"window_size": 128}, "windows (128 tokens)"),
        ({"softmax_type": "learnable"}, "learnable"),
    ],
)
def test_other_layers_are_refused_with_the_reason(changes: dict[str, Any], word: str) -> None:
    reason = missing(**changes)
    assert reason is not None and word in reason
