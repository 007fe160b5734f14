"""The stand-in for Transformer Engine's permutation computes what Megatron computes without it, gradients included."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.platforms.cpu import activate

activate()
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute  # noqa: E402

TOKENS, EXPERTS, HIDDEN, CHOICES = 7, 4, 5, 2


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(CHOICES).indices, True)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    probs = (scores * routing).requires_grad_()
    return tokens, routing, probs


@pytest.mark.parametrize("with_probs", [True, False])
def test_a_round_trip_equals_megatrons(with_probs: bool) -> None:
    results = []
    for fused in (True, False):
        tokens, routing, probs = routed()
        given = probs if with_probs else None
        # newer versions return more
        moved, moved_probs, order = permute(tokens, routing, probs=given, num_out_tokens=TOKENS * CHOICES, fused=fused)[
            :3
        ]
        scaled = moved * moved_probs.unsqueeze(1) if moved_probs is not None else moved
        merging = None if with_probs else probs
        back = unpermute(scaled, order, tokens.shape, probs=merging, routing_map=routing, fused=fused)
        back.square().sum().backward()
        results.append([moved, back, tokens.grad, probs.grad])
    for ours, megatrons in zip(*results, strict=True):
        torch.testing.assert_close(ours, megatrons)


def test_chunks_are_sorted_as_megatron_sorts_them() -> None:
    rows, probs = torch.randn(6, 3), torch.rand(6)
    sizes, order = torch.tensor([1, 3, 0, 2]), torch.tensor([3, 1, 2, 0])
    for given in (probs, None):
        ours, theirs = (sort_chunks_by_idxs(rows, sizes, order, probs=given, fused=fused) for fused in (True, False))
        torch.testing.assert_close(ours[0], theirs[0])
        assert given is None or torch.equal(ours[1], theirs[1])


def test_padding_to_a_capacity_is_refused() -> None:
    tokens, routing, _ = routed()
    with pytest.raises(ValueError, match="14 tokens are routed, and num_out_tokens is 16"):
        permute(tokens, routing, num_out_tokens=16, fused=True)
