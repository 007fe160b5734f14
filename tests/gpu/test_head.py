"""The head on a GPU: its kernels against plain torch, the whole head against fp64, and its memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_head import peak_bytes
from swift_megatron_grpo.training.head.fused import Head, fused_log_probs, rows_per_chunk
from swift_megatron_grpo.training.head.matmuls import add_d_weight_
from swift_megatron_grpo.training.head.row_statistics import Vocabulary
from swift_megatron_grpo.training.head.softmax import combine, sums_of_rows, to_gradient_
from tests.unit.training.head.test_fused import error, in_fp64, rounded_like_bf16, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K, H, V = 1000, 512, 50_001


def head(entropy: bool, chunk: int = 384) -> Head:
    return Head(Vocabulary(0, V - 7, 0.9, None), entropy, chunk)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(K, H, device="cuda").to(dtype).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(V, H, device="cuda") * 3 / H**0.5).to(dtype))
    weight.main_grad = torch.zeros(V, H, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return rows, weight, torch.randint(0, V - 7, (K,), device="cuda")


@pytest.mark.parametrize("entropy", [False, True])
def test_kernels_match_plain_torch(entropy: bool) -> None:
    from tests.unit.training.head.kernel_cases import CASES, check, check_nan

    for case in CASES:
        check(case, entropy, "cuda")
    check_nan("cuda")


@pytest.mark.parametrize("entropy", [False, True])
def test_bf16_adds_below_1e_3_to_rounding_logits_and_their_gradient(entropy: bool) -> None:
    rows, weight, targets = inputs(torch.bfloat16)
    grad = torch.randn(K, 1 + entropy, device="cuda")
    run(rows, weight, targets, head(entropy), grad)
    real = V - 7
    d_rows, d_weight = rounded_like_bf16(rows, weight.detach()[:real], targets, head(entropy), grad)
    assert error(weight.main_grad[:real], d_weight) < 1e-3  # type: ignore[attr-defined]
    assert not weight.main_grad[real:].any()  # type: ignore[attr-defined]
    assert error(rows.grad, d_rows.bfloat16().double()) < 1e-3


@pytest.mark.parametrize("entropy", [False, True])
def test_fp32_matches_fp64(entropy: bool) -> None:
    rows, weight, targets = inputs(torch.float32)
    grad = torch.randn(K, 1 + entropy, device="cuda")
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        values = run(rows, weight, targets, head(entropy), grad)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    expected, d_rows, d_weight = in_fp64(rows, weight, targets, head(entropy), grad)
    assert error(values, expected) < 1e-6
    assert error(rows.grad, d_rows) < 5e-6 and error(weight.main_grad, d_weight) < 5e-6  # type: ignore[attr-defined]


def test_a_frozen_weight_gives_the_same_log_probs_and_row_gradients() -> None:
    rows, weight, targets = inputs(torch.bfloat16)
    grad = torch.randn(K, 1, device="cuda")
    values = run(rows, weight, targets, head(False), grad)
    assert rows.grad is not None
    expected = rows.grad.double()
    weight.requires_grad_(False)
    assert torch.equal(run(rows, weight, targets, head(False), grad), values)
    assert error(rows.grad, expected) < 5e-3  # rounded to bf16 before and after scaling, not once


def test_micro_batches_and_chunks_add_up() -> None:
    rows, weight, targets = inputs(torch.bfloat16)
    gradients = []
    for chunk in (64, K):
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        for _ in range(2):
            run(rows, weight, targets, head(False, chunk), torch.ones(K, 1, device="cuda"))
        gradients.append(weight.main_grad.clone())  # type: ignore[attr-defined]
    assert error(gradients[0], gradients[1].double()) < 1e-5


def test_the_weight_gradient_is_added_in_place() -> None:
    left = torch.randn(256, V, device="cuda").bfloat16()
    right = torch.randn(256, H, device="cuda").bfloat16()
    total = torch.ones(V, H, device="cuda")
    add_d_weight_(total, left, right)  # cuBLAS allocates its workspace in the first call
    total.fill_(1)
    assert peak_bytes(lambda: add_d_weight_(total, left, right)) < 2**20
    expected = 1 + left.double().T @ right.double()
    assert error(total, expected) < 1e-6


def test_kernels_index_more_than_2_31_logits() -> None:
    rows, columns = 15_000, 151_936
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[-1, -1] = 5.0
    targets = torch.full((rows,), columns - 1, device="cuda")
    vocabulary = Vocabulary(0, columns, 1.0, None)
    sums = sums_of_rows(logits, targets, vocabulary, False)
    assert sums[2, -1].item() == 5.0 and sums[0, -1].item() == 5.0 and sums[0, :-1].max().item() == 0.0
    stats = combine([sums], 1.0)
    to_gradient_(logits, targets, stats, torch.ones(rows, 1, device="cuda"), vocabulary)
    p = stats.logprob[-1].exp().item()
    assert logits[-1, -1].item() == pytest.approx(1 - p, rel=1e-2)
    assert logits[-2, -1].item() == pytest.approx(1, rel=1e-2)


def test_memory_for_16k_rows_and_152k_tokens_is_that_of_one_chunk() -> None:
    k, h, v = 16_384, 256, 151_936
    rows = torch.randn(k, h, device="cuda").bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(v, h, device="cuda").bfloat16() / h**0.5)
    weight.main_grad = torch.zeros(v, h, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    targets = torch.randint(0, v, (k,), device="cuda")
    chunk = rows_per_chunk(k, v, torch.bfloat16, on_cuda=True)
    settings = Head(Vocabulary(0, v, 1.0, None), False, chunk)
    peak = peak_bytes(lambda: fused_log_probs(rows, weight, targets, settings).sum().backward())
    assert peak < 1.2 * chunk * v * 2 < 0.31 * k * v * 2
