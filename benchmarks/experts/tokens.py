"""Measure what Megatron 0.18.2 runs around the experts with the dispatcher `alltoall`, without expert parallelism.

`sort chunks` is its second permutation, which moves nothing here but runs. SwiGLU is measured as an MoE layer has it,
weighted by probabilities (torch.compile), and with the kernel that dense layers have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.experts.inputs import Settings, Sizes, draw_routing, draw_rows
from benchmarks.experts.rows import attempt
from benchmarks.experts.swiglu import swiglu_on
from benchmarks.experts.timing import Pass, timed

TOKENS = "tokens"  # as one of the ways of the command line
MakePass = Callable[[], Pass]


def rows_of_tokens(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row, or a failure, for each function and size."""
    for experts, tokens in product(settings.experts, settings.tokens):
        sizes = settings.sizes(experts, tokens)
        for name, make in token_passes(sizes, settings):
            yield attempt(f"{name} {sizes}", partial(row_of_pass, name, make, sizes, settings))
    sizes = settings.sizes(settings.experts[0], settings.tokens[0])
    for name, make_on in (("SwiGLU", plain_pass), ("SwiGLU, weighted", weighted_pass)):
        make = partial(make_on, sizes, settings.device)
        yield attempt(name, partial(row_of_pass, name, make, sizes, settings))


def row_of_pass(name: str, make: MakePass, sizes: Sizes, settings: Settings) -> dict[str, Any]:
    times = timed(make(), settings.repeats, not settings.dry)
    return {"row": {"name": name, "experts": sizes.experts, "tokens": sizes.tokens, **times}}


def token_passes(sizes: Sizes, settings: Settings) -> Iterator[tuple[str, MakePass]]:
    """Yield what builds each pass that moves tokens, with Transformer Engine's kernel (fused) and without."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    device = settings.device
    routing = draw_routing(sizes, settings.unevenness).to(device)
    weights = torch.rand(routing.shape, device=device)
    tokens = draw_rows(sizes.tokens, sizes.hidden, device, 1)
    rows = draw_rows(sizes.rows, sizes.hidden, device, 2)
    counts, order = routing.sum(0), torch.arange(sizes.experts, device=device)

    def permutation(fused: bool) -> Pass:
        leaf, probs = tokens.clone().requires_grad_(), (weights * routing).requires_grad_()

        def forward() -> list[torch.Tensor]:
            return list(permute(leaf, routing, probs, num_out_tokens=sizes.rows, fused=fused)[:2])

        return Pass(forward, [rows, torch.ones(sizes.rows, device=device)], [leaf, probs])

    def sorting(fused: bool) -> Pass:
        leaf, probs = rows.clone().requires_grad_(), torch.rand(sizes.rows, device=device).requires_grad_()

        def forward() -> list[torch.Tensor]:
            return list(sort_chunks_by_idxs(leaf, counts, order, probs=probs, fused=fused))

        return Pass(forward, [rows, torch.ones_like(probs.detach())], [leaf, probs])

    def unpermutation(fused: bool) -> Pass:
        indices = permute(tokens, routing, weights * routing, num_out_tokens=sizes.rows, fused=fused)[2]
        leaf = rows.clone().requires_grad_()

        def forward() -> list[torch.Tensor]:
            return [unpermute(leaf, indices, tokens.shape, routing_map=routing, fused=fused)]

        return Pass(forward, [tokens], [leaf])

    for name, make in (("permute", permutation), ("sort chunks", sorting), ("unpermute", unpermutation)):
        yield f"{name}, fused", partial(make, True)
        yield name, partial(make, False)


def plain_pass(sizes: Sizes, device: torch.device) -> Pass:
    gate_and_up, upstream = draw_activations(sizes, device)
    activation = swiglu_on(device)
    return Pass(lambda: [activation(gate_and_up)], [upstream], [gate_and_up])


def weighted_pass(sizes: Sizes, device: torch.device) -> Pass:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    gate_and_up, upstream = draw_activations(sizes, device)
    probs = torch.rand(sizes.rows, 1, device=device).requires_grad_()
    return Pass(lambda: [weighted_bias_swiglu_impl(gate_and_up, None, probs)], [upstream], [gate_and_up, probs])


def draw_activations(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of SwiGLU, and the gradient of its output."""
    gate_and_up = draw_rows(sizes.rows, 2 * sizes.ffn, device, 1).requires_grad_()
    return gate_and_up, draw_rows(sizes.rows, sizes.ffn, device, 2)
