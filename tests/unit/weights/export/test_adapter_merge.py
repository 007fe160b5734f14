"""Merged weights against fp64: one rounding, whichever product computes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from swift_megatron_grpo.weights.export.export import merge

EXPERTS, OUT, IN, RANK, SCALING = 3, 40, 24, 4, 1.7
Weights = list[torch.Tensor]


def draw(dtype: torch.dtype, size: float, *shape: int) -> torch.Tensor:
    return (torch.randn(shape) * size).to(dtype)


def make(dtype: torch.dtype, together: bool) -> tuple[Weights, Weights, Weights]:
    """Return bases, downs and ups, each kind in one memory or in memories of their own."""
    torch.manual_seed(0)
    tensors = [
        draw(dtype, 0.02, EXPERTS, OUT, IN),
        draw(dtype, 0.02, EXPERTS, RANK, IN),
        draw(dtype, 1, EXPERTS, OUT, RANK),
    ]
    parts = [list(tensor.unbind()) for tensor in tensors]
    bases, downs, ups = parts if together else [[part.clone() for part in kind] for kind in parts]
    return bases, downs, ups


def exact(bases: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> Weights:
    triples = zip(bases, downs, ups, strict=True)
    return [base.double() + SCALING * up.double() @ down.double() for base, down, up in triples]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_once(dtype: torch.dtype, together: bool) -> None:
    bases, downs, ups = make(dtype, together)
    before = [base.clone() for base in bases]
    for found, wanted in zip(merge(bases, downs, ups, SCALING), exact(bases, downs, ups), strict=True):
        assert found.dtype == dtype
        half_a_unit = wanted.abs() * torch.finfo(dtype).eps / 2
        assert ((found.double() - wanted).abs() <= half_a_unit + 1e-7).all()  # what sums in fp32 differ by
    assert all(torch.equal(base, copy) for base, copy in zip(bases, before, strict=True))


def test_the_products_of_experts_in_one_memory_are_launched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    together = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *tensors, **options: calls.append(1) or together(*tensors, **options))
    merge(*make(torch.bfloat16, together=True), SCALING)
    assert calls == [1]
    merge(*make(torch.bfloat16, together=False), SCALING)
    assert calls == [1]


def test_a_router_in_fp32_takes_an_adapter_in_bf16() -> None:
    [base], [down], [up] = ([draw(dtype, 1, *shape)] for dtype, shape in (
        (torch.float32, (OUT, IN)), (torch.bfloat16, (RANK, IN)), (torch.bfloat16, (OUT, RANK))
    ))  # fmt: skip
    [found], [wanted] = merge([base], [down], [up], SCALING), exact([base], [down], [up])
    assert found.dtype == torch.float32 and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
