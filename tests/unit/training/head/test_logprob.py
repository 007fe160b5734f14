"""Log-probs, entropies and their gradients against fp64 and plain torch."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.head.logprob import log_probs_of
from swift_megatron_grpo.training.head.row_statistics import Vocabulary


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    log_p = (logits.double() / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], entropy], -1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_match_fp64(temperature: float, entropy: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(33, 50) * 4
    targets = torch.randint(0, 50, (33,))
    upstream = torch.randn(33, 2)[:, : 1 + entropy]
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()

    values = log_probs_of(leaf, targets, Vocabulary(0, 50, temperature, None), entropy)
    (values * upstream).sum().backward()
    expected = reference(exact, targets, temperature)[:, : 1 + entropy]
    (expected * upstream.double()).sum().backward()

    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_computed_in_fp32() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(20, 1000) * 3).bfloat16()
    targets = torch.randint(0, 1000, (20,))
    leaf = logits.clone().requires_grad_()
    values = log_probs_of(leaf, targets, Vocabulary(0, 1000, 0.9, None), True)
    torch.testing.assert_close(values.double(), reference(logits, targets, 0.9), rtol=1e-5, atol=1e-5)
    values.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_columns_that_pad_the_vocabulary_have_no_probability() -> None:
    logits = torch.randn(5, 12)
    logits[:, 10:] = 100.0
    targets = torch.randint(0, 10, (5,))
    padded = logits.clone().requires_grad_()
    values = log_probs_of(padded, targets, Vocabulary(0, 10, 1.0, None), True)
    values.sum().backward()
    torch.testing.assert_close(values.double(), reference(logits[:, :10], targets, 1.0), rtol=1e-6, atol=1e-6)
    assert padded.grad[:, 10:].abs().max() == 0


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    values = log_probs_of(logits, torch.tensor([1, 2]), Vocabulary(0, 3, 1.0, None), True)
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(logits.grad).all()
    assert values[0, 0].item() == pytest.approx(-2e4) and values[0, 1].item() == pytest.approx(0)


def test_the_given_logits_are_not_changed() -> None:
    logits = torch.randn(4, 6)
    before = logits.clone()
    log_probs_of(logits, torch.tensor([0, 1, 2, 3]), Vocabulary(0, 5, 1.0, None), False)
    assert torch.equal(logits, before)
