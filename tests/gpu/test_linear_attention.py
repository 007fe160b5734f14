"""flash-linear-attention's kernels on a GPU match the CPU platform's functions, which tests compare with transformers.

The kernels read bf16 and keep sums in fp32. Bounds are relative to the norm of the exact tensor; a wrong kernel (Triton
3.4 to 3.7.0 on Hopper) is off by much more.
"""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.platforms.cpu.linear_attention import fla as plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BOUNDS = [0, 257, 321, 512]  # three sequences of a pack, none a multiple of a chunk
KEY_HEADS, VALUE_HEADS, CHANNELS = 4, 8, 128


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def poison_free_memory() -> None:
    """Fill what the allocator hands out next with NaN: a kernel may read only what was written."""
    torch.full((2**31,), float("nan"), device="cuda", dtype=torch.bfloat16)


def inputs_of_the_rule(decay: float) -> list[torch.Tensor]:
    """Return q, k, v, g and beta of one pack, as a delta net computes them; the first three in bf16.

    `decay`: how far a token's g goes below 0. A new net, with A up to 16 and a bias of 1 before softplus, has 21.
    """
    torch.manual_seed(0)
    tokens = BOUNDS[-1]
    q, k = (torch.randn(1, tokens, KEY_HEADS, CHANNELS, device="cuda").bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, CHANNELS, device="cuda").bfloat16()
    g = -decay * torch.rand(1, tokens, VALUE_HEADS, device="cuda")
    beta = torch.rand(1, tokens, VALUE_HEADS, device="cuda").bfloat16()
    return [tensor.requires_grad_() for tensor in (q, k, v, g, beta)]


@pytest.mark.parametrize("decay", [1, 21])
def test_the_delta_rule_and_its_gradients_match_the_cpu_platform(decay: float) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds = torch.tensor(BOUNDS, device="cuda", dtype=torch.int32)
    inputs = inputs_of_the_rule(decay)
    poison_free_memory()
    output, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact, _ = plain.chunk_gated_delta_rule(*exact_inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
    direction = torch.randn_like(exact)
    poison_free_memory()
    gradients = torch.autograd.grad(output, inputs, direction.to(output.dtype))
    exact_gradients = torch.autograd.grad(exact, exact_inputs, direction)
    names = ("output", "q", "k", "v", "g", "beta")
    found = {
        name: difference(*pair)
        for name, *pair in zip(names, (output, *gradients), (exact, *exact_gradients), strict=True)
    }
    print(found)
    assert all(value < 0.02 for value in found.values()), found


def test_the_convolution_and_its_gradients_match_the_cpu_platform() -> None:
    from fla.modules.convolution import causal_conv1d

    torch.manual_seed(0)
    bounds = torch.tensor(BOUNDS, device="cuda", dtype=torch.int32)
    x = torch.randn(1, BOUNDS[-1], 256, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(256, 4, device="cuda").bfloat16().requires_grad_()
    poison_free_memory()
    output, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=bounds)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact, _ = plain.causal_conv1d(*exact_inputs, activation="silu", cu_seqlens=bounds)
    direction = torch.randn_like(exact)
    poison_free_memory()
    gradients = torch.autograd.grad(output, (x, weight), direction.to(output.dtype))
    exact_gradients = torch.autograd.grad(exact, exact_inputs, direction)
    pairs = zip((output, *gradients), (exact, *exact_gradients), strict=True)
    assert all(difference(*pair) < 0.02 for pair in pairs)
