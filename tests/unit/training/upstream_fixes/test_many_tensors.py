"""Long lists of tensors reach multi-tensor kernels in parts, with the results of one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_megatron_grpo.platforms.cpu.transformer_engine import optimizers
from swift_megatron_grpo.training.upstream_fixes import multi_tensor_kernels
from swift_megatron_grpo.training.upstream_fixes.multi_tensor_kernels import in_parts

COUNT = 11  # tensors, in parts of 4


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the lists that reach a kernel."""
    monkeypatch.setattr(multi_tensor_kernels, "MOST_TENSORS", 4)
    return []


def call(lengths: list[int], op: Any, lists: list[list[torch.Tensor]], *arguments: Any) -> Any:
    """Call a kernel as `multi_tensor_applier(op, noop_flag, lists, ...)` does."""

    def whole(_: Any, op: Any, noop_flag: torch.Tensor, part: list[list[torch.Tensor]], *rest: Any) -> Any:
        lengths.append(len(part[0]))
        return optimizers.multi_tensor_applier(op, noop_flag, part, *rest)

    return in_parts(whole)(None, op, torch.zeros(1), lists, *arguments)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3 + index, generator=generator) for index in range(COUNT)]


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_norm_is_that_of_all_tensors(lengths: list[int], per_tensor: bool) -> None:
    norm, each = call(lengths, optimizers.multi_tensor_l2norm, [tensors()], per_tensor)
    assert lengths == [4, 4, 3]
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat(tensors())).view(1))
    expected = torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors()])
    torch.testing.assert_close(each, expected if per_tensor else expected[:0])


def test_every_tensor_is_scaled_once(lengths: list[int]) -> None:
    scaled = tensors()
    call(lengths, optimizers.multi_tensor_scale, [scaled, scaled], 0.5)
    for tensor, before in zip(scaled, tensors(), strict=True):
        torch.testing.assert_close(tensor, before * 0.5)


def test_short_lists_go_in_one_call(lengths: list[int]) -> None:
    call(lengths, optimizers.multi_tensor_scale, [tensors()[:4], tensors()[:4]], 0.5)
    assert lengths == [4]
