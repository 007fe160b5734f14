"""Relative errors of a way to fp64, on memory that held NaN before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from benchmarks.experts.inputs import START, Loads, Sizes, Weights, draw_routing, draw_rows, draw_weights, loads_of
from benchmarks.experts.swiglu import plain_swiglu
from benchmarks.experts.ways import build_block


def errors_of(
    way: str, sizes: Sizes, unevenness: float, empty: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Return the errors of the worst expert in one forward and backward."""
    loads = loads_of(draw_routing(sizes, unevenness, empty))
    weights = draw_weights(sizes, device)
    x, upstream = (draw_rows(sizes.rows, sizes.hidden, device, seed) for seed in (1, 2))
    expected = in_fp64(x, upstream, weights, loads)
    block = build_block(way, weights, trained=True)
    x.requires_grad_()
    poison_free_memory(device)
    y = block(x, loads)
    poison_free_memory(device)
    y.backward(upstream)
    assert x.grad is not None
    found: dict[str, Sequence[torch.Tensor]] = {
        "output": y.detach().double().split(loads.counts),
        "d_input": x.grad.double().split(loads.counts),
        "d_fc1": list(weights.fc1_grad.double() - START),
        "d_fc2": list(weights.fc2_grad.double() - START),
    }
    return {
        name: max(relative_error(*pair) for pair in zip(values, expected[name], strict=True))
        for name, values in found.items()
    }


def in_fp64(x: torch.Tensor, upstream: torch.Tensor, weights: Weights, loads: Loads) -> dict[str, list[torch.Tensor]]:
    """Return output, input gradient and weight gradients of each expert."""
    results: dict[str, list[torch.Tensor]] = {"output": [], "d_input": [], "d_fc1": [], "d_fc2": []}
    pieces = zip(x.split(loads.counts), upstream.split(loads.counts), weights.fc1, weights.fc2, strict=True)
    for rows, grad, fc1, fc2 in pieces:
        inputs = [tensor.double().requires_grad_() for tensor in (rows, fc1, fc2)]
        y = F.linear(plain_swiglu(F.linear(inputs[0], inputs[1])), inputs[2])
        values = (y.detach(), *torch.autograd.grad(y, inputs, grad.double()))
        for column, value in zip(results.values(), values, strict=True):
            column.append(value)
    return results


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error, or the absolute one where zeros are expected; NaN counts as infinite."""
    error, size = (found - expected).norm().item(), expected.norm().item()
    result = error / size if size else error
    return result if result == result else float("inf")


def poison_free_memory(device: torch.device) -> None:
    """Fill memory that the next tensors will be allocated from with NaN."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    block = torch.full((2**30 if device.type == "cuda" else 2**20,), torch.nan, device=device)
    del block
