"""Moments in bf16: what an optimizer step of Transformer Engine needs in addition, with portions and without."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.optimizer import adam_portions
from swift_megatron_grpo.training.optimizer.adam_portions import in_portions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNT, NUMEL = 64, 2**22
COPIES = COUNT * NUMEL * 8  # bytes of both moments in fp32


def stepped(divided: bool) -> tuple[list[torch.Tensor], int]:
    """Return the weights after two steps, and the memory that the second step needed in addition."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    step = FusedAdam.step
    assert "in_portions" not in vars(step)
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(NUMEL, device="cuda", generator=generator).bfloat16() for _ in range(COUNT)]
    adam = FusedAdam(
        weights, lr=1e-3, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16, master_weights=True,
        store_param_remainders=True, use_decoupled_grad=True,
    )  # fmt: skip
    for weight in weights:
        weight.decoupled_grad = torch.randn(NUMEL, device="cuda", generator=generator)  # type: ignore[attr-defined]
    more = 0
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (in_portions(step) if divided else step)(adam)
        more = torch.cuda.max_memory_allocated() - before
    return weights, more


def test_portions_give_the_same_bits_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_portions, "LARGEST", 4 * NUMEL)
    expected, whole = stepped(divided=False)
    found, bounded = stepped(divided=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert bounded < 1.1 * COPIES * 4 / COUNT
    assert whole > 0.9 * COPIES, "upstream has changed: see adam_portions.py"
