"""Check which layers get torch's flash kernel; tests/gpu/test_torch_attention.py compares what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_megatron_grpo.training.layers.torch_attention import what_is_missing

PLAIN: dict[str, Any] = {
    "context_parallel_size": 1,
    "multi_latent_attention": False,
    "params_dtype": torch.bfloat16,
    "attention_dropout": 0.0,
    "window_size": None,
    "softmax_type": "vanilla",
}


def missing(channels: int = 128, **changes: Any) -> str | None:
    config: Any = SimpleNamespace(**{**PLAIN, **changes})
    return what_is_missing(config, channels)


@pytest.mark.parametrize("channels", [64, 128, 256])
def test_plain_layers_are_computed(channels: int) -> None:
    assert missing(channels) is None


@pytest.mark.parametrize(
    ("changes", "word", "advice"),
    [
        ({"context_parallel_size": 2}, "--context_parallel_size 2", "fused"),
        ({"multi_latent_attention": True}, "multi-latent attention", "fused"),
        ({"channels": 512}, "256 are the most", "unfused"),
        ({"params_dtype": torch.float32}, "torch.float32", "unfused"),
        ({"attention_dropout": 0.1}, "--attention_dropout 0.1", "fused"),
        ({"window_size": 128}, "windows (128 tokens)", "fused"),
        ({"softmax_type": "learnable"}, "learnable", "fused"),
    ],
)
def test_other_layers_are_refused_with_a_kernel_that_has_them(changes: dict[str, Any], word: str, advice: str) -> None:
    found = missing(**changes)
    assert found is not None and word in found and found.endswith(f"--attention_backend {advice}")
