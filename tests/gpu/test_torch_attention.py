"""torch's flash kernel, forward and backward, against exact arithmetic, on memory full of NaN."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from swift_megatron_grpo.platforms.attention_packages import has_flash_attention
from swift_megatron_grpo.training.layers.attention_check import poison_free_memory, relative_error
from swift_megatron_grpo.training.layers.torch_attention import attend
from tests.gpu.conftest import Gpus, needs_cuda

pytestmark = pytest.mark.gpu
QUERIES = [333, 64, 1, 450]
KEYS = {"whole sequences": QUERIES, "completions behind a prompt": [333, 397, 334, 783]}


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: list[int], scale: float) -> torch.Tensor:
    """Return attention in which the last query of each sequence sees its last key; [n, heads * d]."""
    copies = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(copies, dim=1) for tensor in (k, v))
    outputs = []
    for (begin, end), (first, last) in zip(
        pairwise([0, *accumulate(QUERIES)]), pairwise([0, *accumulate(keys)]), strict=True
    ):
        scores = scale * torch.einsum("qhd,khd->hqk", q[begin:end], k[first:last])
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril(last - first - (end - begin))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[first:last]))
    return torch.cat(outputs).flatten(1)


@needs_cuda
@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize(("heads", "groups", "channels"), [(16, 8, 128), (8, 2, 256), (4, 4, 64)])
def test_output_and_gradients_are_those_of_exact_arithmetic(case: str, heads: int, groups: int, channels: int) -> None:
    torch.manual_seed(0)
    keys, device = KEYS[case], torch.device("cuda")
    packed = SimpleNamespace(
        cu_seqlens_q=bounds_of(QUERIES),
        cu_seqlens_kv=bounds_of(keys),
        max_seqlen_q=max(QUERIES),
        max_seqlen_kv=max(keys),
    )
    q = torch.randn(sum(QUERIES), heads, channels, device=device, dtype=torch.bfloat16).requires_grad_()
    k, v = (
        torch.randn(sum(keys), groups, channels, device=device, dtype=torch.bfloat16).requires_grad_() for _ in "kv"
    )
    direction = torch.randn(sum(QUERIES), heads * channels, device=device, dtype=torch.bfloat16)
    scale = channels**-0.5
    poison_free_memory(device)
    output = attend(scale, q, k, v, None, None, packed_seq_params=packed)
    poison_free_memory(device)
    gradients = torch.autograd.grad(output, (q, k, v), direction)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = exact_attention(*exact_inputs, keys, scale)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, direction.double())
    pairs = zip((output, *gradients), (exact, *exact_gradients), strict=True)
    errors = {name: relative_error(found, right) for name, (found, right) in zip("oqkv", pairs, strict=True)}
    assert all(error < 0.01 for error in errors.values()), errors  # rounding to bf16 costs about 0.003


@pytest.mark.skipif(has_flash_attention(), reason="Transformer Engine then has flash attention")
def test_two_steps_match_those_with_cudnns_attention(gpus: Gpus) -> None:
    flash, fused = (
        json.loads((gpus.folder / folder / "one.json").read_text()) for folder in ("torch-attention", "dense-full")
    )
    for step, expected in zip(flash["metrics"], fused["metrics"], strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
        assert step["loss"] == pytest.approx(expected["loss"], abs=0.005)
