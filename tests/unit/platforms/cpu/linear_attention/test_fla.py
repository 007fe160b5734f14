"""The stand-ins of flash-linear-attention match a recurrence in fp64, sequence by sequence, forward and backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.linear_attention.fla import causal_conv1d, chunk_gated_delta_rule, l2norm

LENGTHS = [1, 3, 63, 64, 65, 130]  # around the size of a chunk
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS, WIDTH = 2, 4, 8, 6, 10, 4


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    """Compute one sequence token by token: [t, h, k], [t, h, k], [t, h, v], [t, h], [t, h] -> [t, h, v]."""
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=v.dtype)
    outputs = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv,h->hkv", k[t], error, beta[t])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def rule_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, k = (F.normalize(torch.randn(1, tokens, HEADS, KEY_SIZE, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, VALUE_SIZE, dtype=dtype)
    g = -torch.rand(1, tokens, VALUE_HEADS, dtype=dtype)
    beta = torch.rand(1, tokens, VALUE_HEADS, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def of_sequences(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """Split [1, t, ...] into the tensors of each sequence, [t, ...]."""
    return [[x[0, begin:end] for x in tensors] for begin, end in pairwise(BOUNDS)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_the_rule_and_its_gradients_match_a_recurrence_in_fp64() -> None:
    inputs = rule_inputs(torch.float64)
    weight = torch.randn(1, sum(LENGTHS), VALUE_HEADS, VALUE_SIZE, dtype=torch.float64)
    output, state = chunk_gated_delta_rule(*inputs, cu_seqlens=BOUNDS)
    gradients = torch.autograd.grad((output * weight).sum(), inputs)
    copies = VALUE_HEADS // HEADS
    expected = torch.cat(
        [
            recurrence(q.repeat_interleave(copies, 1) * KEY_SIZE**-0.5, k.repeat_interleave(copies, 1), v, g, beta)
            for q, k, v, g, beta in of_sequences(*inputs)
        ]
    )[None]
    assert state is None and relative(output, expected) < 1e-12
    for ours, theirs in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert relative(ours, theirs) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_alone_and_packed(dtype: torch.dtype) -> None:
    inputs = [x.detach().to(dtype) for x in rule_inputs(torch.float32)]
    packed, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=BOUNDS)
    assert packed.dtype == dtype
    for (output,), alone in zip(of_sequences(packed), of_sequences(*inputs), strict=True):
        assert torch.equal(output, chunk_gated_delta_rule(*(x[None] for x in alone))[0][0])


def test_the_rule_in_fp32_matches_fp64() -> None:
    exact = rule_inputs(torch.float64)
    output, _ = chunk_gated_delta_rule(*(x.detach().float() for x in exact), cu_seqlens=BOUNDS)
    assert relative(output.double(), chunk_gated_delta_rule(*exact, cu_seqlens=BOUNDS)[0].detach()) < 1e-6


def test_the_norm_within_the_rule_is_the_norm_before_it() -> None:
    q, k, *others = (x.detach() * 3 for x in rule_inputs(torch.float64))
    within, _ = chunk_gated_delta_rule(q, k, *others, use_qk_l2norm_in_kernel=True)
    before, _ = chunk_gated_delta_rule(l2norm(q), l2norm(k), *others)
    assert torch.equal(within, before)


def test_the_norm_matches_its_formula_in_fp64() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    expected = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    assert torch.allclose(l2norm(x), expected, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(l2norm, (x,))
    assert l2norm(x.detach().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_and_its_gradients_match_torch_in_fp64(activation: str | None, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [x, weight, *([offset] if offset is not None else [])]
    output, _ = causal_conv1d(x, weight, offset, activation=activation, cu_seqlens=BOUNDS)
    parts = []
    for (sequence,) in of_sequences(x):
        padded = F.pad(sequence.T, (WIDTH - 1, 0))[None]
        parts.append(F.conv1d(padded, weight[:, None], offset, groups=CHANNELS)[0].T)
    expected = torch.cat(parts)[None]
    expected = expected if activation is None else F.silu(expected)
    assert relative(output, expected) < 1e-14
    ours, theirs = (torch.autograd.grad(result.square().sum(), inputs) for result in (output, expected))
    assert all(relative(a, b) < 1e-13 for a, b in zip(ours, theirs, strict=True))


def test_a_convolved_sequence_has_the_same_bits_alone_and_packed() -> None:
    x, weight = torch.randn(1, sum(LENGTHS), CHANNELS), torch.randn(CHANNELS, WIDTH)
    packed, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=BOUNDS)
    for (output,), (alone,) in zip(of_sequences(packed), of_sequences(x), strict=True):
        assert torch.equal(output, causal_conv1d(alone[None], weight, activation="silu")[0][0])


@pytest.mark.parametrize(
    ("function", "argument"),
    [("rule", "initial_state"), ("rule", "head_first"), ("convolution", "residual"), ("convolution", "backend")],
)
def test_what_the_stand_in_lacks_is_refused(function: str, argument: str) -> None:
    value: Any = torch.zeros(1) if argument in ("initial_state", "residual") else True
    with pytest.raises(NotImplementedError, match=f"{argument}=.*not implemented on the CPU platform"):
        if function == "rule":
            chunk_gated_delta_rule(*rule_inputs(torch.float32), **{argument: value})
        else:
            causal_conv1d(torch.zeros(1, 2, 3), torch.zeros(3, 4), **{argument: value})


def test_bounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        chunk_gated_delta_rule(*rule_inputs(torch.float32), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        causal_conv1d(torch.zeros(1, 2, 3), torch.zeros(3, 4), cu_seqlens=torch.tensor([0, 5]))
