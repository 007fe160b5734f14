"""A step that is run again after it ran out of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_megatron_grpo.training import engine
from swift_megatron_grpo.training.engine import MegatronEngine


class Router(torch.nn.Module):
    """The counter of megatron-core's TopKRouter, to which every forward pass of training adds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)

    def zero_grad_buffer(self) -> None: ...


def test_a_repeated_step_counts_the_tokens_of_experts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router, passes_begun = Router(), 0

    def run(*_: Any, **__: Any) -> tuple[list[Any], None]:
        nonlocal passes_begun
        passes_begun += 1
        router.get_buffer("local_tokens_per_expert").add_(torch.tensor([3.0, 0.0, 0.0, 1.0]))
        if passes_begun == 1:
            raise torch.OutOfMemoryError("of the second micro batch")
        return [], None

    monkeypatch.setattr(engine, "pop_moe_aux_losses", lambda *_: {})
    config = SimpleNamespace(
        moe_router_enable_expert_bias=True, moe_router_load_balancing_type="none", num_moe_experts=4,
        moe_aux_loss_coeff=0.0,
    )  # fmt: skip
    plan = SimpleNamespace(num_micro_batches=1, over_budget=())
    trained: Any = object.__new__(MegatronEngine)
    trained.steps_done, trained._draft_head = 0, None
    trained.parallel = SimpleNamespace(dp_size=1, rank=0)
    trained.optimizer = SimpleNamespace(zero_grad=lambda: None)
    trained._memory_agreement = SimpleNamespace(start_step=lambda: None, report_failure=lambda: True)
    trained.passes = SimpleNamespace(
        models=[router], config=config, plan=lambda _: plan, run=run, lower_budget=lambda *_, **__: True
    )
    trained._forward_backward([], lambda *_: None, ("logprob",))
    assert router.get_buffer("local_tokens_per_expert").tolist() == [3.0, 0.0, 0.0, 1.0]
