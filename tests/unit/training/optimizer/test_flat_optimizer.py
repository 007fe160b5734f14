"""Gradients of the norm are joined where they follow each other, and no further."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.optimizer import adam_portions
from swift_megatron_grpo.training.optimizer.flat_optimizer import _joined


def test_neighbours_are_joined_up_to_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count in 32 bits, and the gradients of a large model are more numbers."""
    monkeypatch.setattr(adam_portions, "LARGEST", 10)
    one, other = torch.arange(30.0), torch.arange(30.0, 60.0)
    gradients = [one[:4], one[4:10], one[10:12], one[13:20], one[20:22], other[22:25], other[25:26], one[26:30]]
    spans = _joined(gradients)
    assert [span.tolist() for span in spans] == [
        part.tolist() for part in (one[:10], one[10:12], one[13:22], other[22:26], one[26:30])
    ]
    assert all(span.untyped_storage().data_ptr() in {one.data_ptr(), other.data_ptr()} for span in spans)
    assert _joined([]) == []


def test_a_gradient_that_is_larger_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_portions, "LARGEST", 10)
    buffer = torch.arange(30.0)
    assert [len(span) for span in _joined([buffer[:20], buffer[20:24], buffer[24:]])] == [20, 10]
