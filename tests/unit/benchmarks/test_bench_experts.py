"""The experts' benchmark: its inputs, and the products of all experts against a loop over them in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.experts.errors import relative_error
from benchmarks.experts.inputs import START, Loads, Sizes, Weights, draw_routing, draw_rows, draw_weights, loads_of
from benchmarks.experts.ways import build_block

CPU = torch.device("cpu")
SIZES = Sizes(experts=8, hidden=32, ffn=16, tokens=64, topk=2)
EMPTY = 3


def test_uneven_loads_have_every_token_at_topk_experts() -> None:
    routing = draw_routing(SIZES, 0.4, [EMPTY])
    loads = loads_of(routing)
    assert (routing.sum(1) == SIZES.topk).all()
    assert sum(loads.counts) == SIZES.rows == SIZES.tokens * SIZES.topk
    assert loads.counts[EMPTY] == 0 and len(set(loads.counts)) > SIZES.experts // 2


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", ["stacked", "parameters", "loop"])
def test_a_way_computes_what_a_loop_over_the_experts_computes(way: str, trained: bool) -> None:
    loads = loads_of(draw_routing(SIZES, 0.4, [EMPTY]))
    drawn = draw_weights(SIZES, CPU)
    weights = Weights(drawn.fc1.float(), drawn.fc2.float(), drawn.fc1_grad, drawn.fc2_grad)
    x, upstream = (draw_rows(SIZES.rows, SIZES.hidden, CPU, seed).float() for seed in (1, 2))
    expected = by_a_loop(x, upstream, weights, loads)

    x.requires_grad_()
    y = build_block(way, weights, trained)(x, loads)
    y.backward(upstream)

    assert x.grad is not None
    found = [y.detach(), x.grad, weights.fc1_grad - START, weights.fc2_grad - START]
    for tensor, other in zip(found[: 4 if trained else 2], expected, strict=False):
        assert relative_error(tensor.double(), other) < 1e-5
    # Frozen weights have no gradients, nor has an expert without tokens.
    for grad in (weights.fc1_grad, weights.fc2_grad):
        assert ((grad[EMPTY] if trained else grad) == START).all()


def by_a_loop(x: torch.Tensor, upstream: torch.Tensor, weights: Weights, loads: Loads) -> list[torch.Tensor]:
    """Return output and the gradients of input, fc1 and fc2, in fp64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, weights.fc1, weights.fc2)]
    rows, fc1, fc2 = leaves
    outputs, begin = [], 0
    for expert, count in enumerate(loads.counts):
        gate, up = (rows[begin : begin + count] @ fc1[expert].T).chunk(2, dim=1)
        outputs.append(F.silu(gate) * up @ fc2[expert].T)
        begin += count
    y = torch.cat(outputs)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.double())]
