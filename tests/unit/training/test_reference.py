"""A moving reference takes all that decides what the policy computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from swift_megatron_grpo.training.reference import MovingReference


class Router(torch.nn.Module):
    """The state of megatron-core's TopKRouter with an expert bias."""

    def __init__(self, weight: float, bias: float, counted: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 2), weight))
        self.register_buffer("expert_bias", torch.full((4,), bias))
        self.register_buffer("local_tokens_per_expert", torch.full((4,), counted), persistent=False)


def test_the_routers_bias_moves_with_their_weights() -> None:
    residency: Any = SimpleNamespace(for_weight_sync=lambda: None, for_reference=lambda: None)
    held, policy = Router(1.0, 0.0, 0.0), Router(2.0, 0.5, 7.0)
    MovingReference([held], [policy], residency, period=1, share=1.0).after_step(1)
    assert held.weight.tolist() == policy.weight.tolist()
    assert held.get_buffer("expert_bias").tolist() == [0.5] * 4
    assert held.get_buffer("local_tokens_per_expert").tolist() == [0.0] * 4  # a count of the policy's own step
