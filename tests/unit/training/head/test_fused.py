"""The fused head, compared with an fp64 reference that computes all logits, and with the generic path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from swift_megatron_grpo.training.head.fused import Head, fused_log_probs
from swift_megatron_grpo.training.head.logprob import log_probs_of
from swift_megatron_grpo.training.head.row_statistics import Vocabulary
from swift_megatron_grpo.training.head.softmax import combine, sums_of_rows, to_gradient_
from tests.unit.training.head.test_logprob import reference

K, H, V = 70, 24, 301


def head(entropy: bool, chunk: int = 16, temperature: float = 0.9, real: int = V) -> Head:
    return Head(Vocabulary(0, real, temperature, None), entropy, chunk)


def inputs(dtype: torch.dtype = torch.float32, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows and a weight that give logits as large as a trained model's, and targets."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(k, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(V, H, generator=generator) * 3 / H**0.5).to(dtype))
    return rows, weight, torch.randint(0, V, (k,), generator=generator)


def upstream(columns: int, k: int = K) -> torch.Tensor:
    return torch.randn(k, columns, generator=torch.Generator().manual_seed(1))


def in_fp64(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, d rows and d weight of the same inputs, by autograd through all logits at once."""
    rows, weight = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = (rows @ weight.T)[:, : head.vocabulary.real]
    values = reference(logits, targets, head.vocabulary.temperature)[:, : 1 + head.entropy]
    (values * grad.double()).sum().backward()
    assert rows.grad is not None and weight.grad is not None
    return values.detach(), rows.grad, weight.grad


def run(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head, grad: torch.Tensor
) -> torch.Tensor:
    rows.grad = weight.grad = None
    values = fused_log_probs(rows, weight, targets, head)
    (values * grad).sum().backward()
    return values.detach()


def error(value: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the relative error."""
    assert value is not None
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("through", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("chunk", [1, 16, 70, 4096])
def test_fp32_is_exact_to_1e_6(through: str, chunk: int) -> None:
    rows, weight, targets = inputs()
    targets[-1] = V - 1  # the last row of the vocabulary
    grad = upstream(2) * torch.tensor({"logprob": [1.0, 0.0], "entropy": [0.0, 1.0], "both": [1.0, 1.0]}[through])
    values = run(rows, weight, targets, head(True, chunk), grad)
    expected, d_rows, d_weight = in_fp64(rows, weight, targets, head(True), grad)
    assert values.dtype == torch.float32 and error(values, expected) < 1e-6
    assert error(rows.grad, d_rows) < 1e-6 and error(weight.grad, d_weight) < 1e-6


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_log_probs_alone_are_exact_to_1e_6(temperature: float) -> None:
    rows, weight, targets = inputs()
    settings = head(False, temperature=temperature)
    values = run(rows, weight, targets, settings, upstream(1))
    expected, d_rows, d_weight = in_fp64(rows, weight, targets, settings, upstream(1))
    assert values.shape == (K, 1) and error(values, expected) < 1e-6
    assert error(rows.grad, d_rows) < 1e-6 and error(weight.grad, d_weight) < 1e-6


def rounded_like_bf16(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d rows and d weight in fp64, rounded only where bf16 products make rounding unavoidable.

    These are the logits, the output of one product, and their gradient, the input of the other two.
    """
    logits = (rows.detach().double() @ weight.detach().double().T).bfloat16().double().requires_grad_()
    values = reference(logits, targets, head.vocabulary.temperature)[:, : 1 + head.entropy]
    (values * grad.double()).sum().backward()
    assert logits.grad is not None
    d_logits = logits.grad.bfloat16().double()
    return d_logits @ weight.detach().double(), d_logits.T @ rows.detach().double()


@pytest.mark.parametrize("entropy", [False, True])
def test_bf16_adds_below_1e_3_to_rounding_logits_and_their_gradient(entropy: bool) -> None:
    rows, weight, targets = inputs(torch.bfloat16)
    weight.main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]  # fp32, as DDP makes it
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    grad = upstream(1 + entropy)
    run(rows, weight, targets, head(entropy), grad)
    d_rows, d_weight = rounded_like_bf16(rows, weight, targets, head(entropy), grad)
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16
    assert error(weight.main_grad, d_weight) < 1e-3  # type: ignore[attr-defined]  # before any rounding of the result
    assert error(rows.grad, d_rows.bfloat16().double()) < 1e-3  # after the result is rounded to bf16

    _, exact_rows, exact_weight = in_fp64(rows, weight, targets, head(entropy), grad)  # nothing rounded at all
    assert error(weight.main_grad, exact_weight) < error(d_weight, exact_weight) + 1e-3  # type: ignore[attr-defined]
    assert error(rows.grad, exact_rows) < error(d_rows.bfloat16(), exact_rows) + 1e-3


def test_bf16_chunks_are_summed_in_fp32() -> None:
    """The error of 64 chunks summed in bf16 would be far larger than that of one chunk."""
    rows, weight, targets = inputs(torch.bfloat16, k=512)
    weight.main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    gradients = []
    for chunk in (512, 8):
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        run(rows, weight, targets, head(False, chunk), torch.ones(512, 1))
        gradients.append(weight.main_grad.clone())  # type: ignore[attr-defined]
    assert error(gradients[1], gradients[0].double()) < 1e-5


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("k", [0, 1, 16, 17])
def test_few_or_no_rows_are_exact_to_1e_6(k: int, entropy: bool) -> None:
    rows, weight, targets = inputs(k=k)
    grad = upstream(1 + entropy, k)
    values = run(rows, weight, targets, head(entropy), grad)
    assert values.shape == (k, 1 + entropy)
    assert rows.grad is not None and rows.grad.shape == (k, H) and weight.grad is not None
    if k == 0:  # a context-parallel rank may hold none; DDP still waits for a gradient
        assert torch.equal(weight.grad, torch.zeros(V, H))
        return
    expected, d_rows, d_weight = in_fp64(rows, weight, targets, head(entropy), grad)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    assert error(rows.grad, d_rows) < 1e-6 and error(weight.grad, d_weight) < 1e-6


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("k", [0, 1, K])
def test_a_frozen_weight_changes_no_value(k: int, entropy: bool) -> None:
    rows, weight, targets = inputs(k=k)
    grad = upstream(1 + entropy, k)
    values = run(rows, weight, targets, head(entropy), grad)
    expected = rows.grad
    assert expected is not None
    weight.requires_grad_(False)
    frozen = run(rows, weight, targets, head(entropy), grad)
    assert torch.equal(frozen, values) and weight.grad is None
    assert k == 0 or error(rows.grad, expected.double()) < 1e-6


@pytest.mark.parametrize("trained", [False, True])
def test_backward_twice_through_a_retained_graph(trained: bool) -> None:
    """The first backward overwrites the logits that forward keeps in the buffer."""
    rows, weight, targets = inputs()
    weight.requires_grad_(trained)
    loss = (fused_log_probs(rows, weight, targets, head(trained)) * upstream(1 + trained)).sum()
    first = torch.autograd.grad(loss, rows, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, rows)[0], first[0])


def test_frozen_in_bf16_confident_rows_keep_their_gradient() -> None:
    """The 1 - p of a target with p close to 1 must not be lost when p is rounded to bf16."""
    rows, weight, targets = inputs(torch.bfloat16)
    with torch.no_grad():
        rows *= 4
    targets = (rows @ weight.T).argmax(-1)
    weight.requires_grad_(False)
    run(rows, weight, targets, head(False), upstream(1))
    d_rows, _ = rounded_like_bf16(rows, weight, targets, head(False), upstream(1))
    assert error(rows.grad, d_rows.bfloat16().double()) < 4e-3  # rounded twice: in forward, and scaled in backward


def test_rows_without_gradient_do_not_change_the_weights_gradient() -> None:
    rows, weight, targets = inputs()
    run(rows, weight, targets, head(True), upstream(2))
    expected = weight.grad
    detached = rows.detach()
    run(detached, weight, targets, head(True), upstream(2))
    assert detached.grad is None and torch.equal(weight.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("entropy", [False, True])
def test_values_are_the_same_without_gradients(entropy: bool) -> None:
    rows, weight, targets = inputs()
    values = run(rows, weight, targets, head(entropy), upstream(1 + entropy))
    with torch.no_grad():
        assert torch.equal(fused_log_probs(rows, weight, targets, head(entropy)), values)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_generic_path_computes_the_same_values_and_gradients(entropy: bool) -> None:
    rows, weight, targets = inputs()
    values = run(rows, weight, targets, head(entropy), upstream(1 + entropy))
    d_rows, d_weight = rows.grad, weight.grad
    rows.grad = weight.grad = None

    def generic(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return log_probs_of(rows @ weight.T, targets, Vocabulary(0, V, 0.9, None), entropy)

    chunks = [
        checkpoint(generic, r, t, use_reentrant=False) for r, t in zip(rows.split(16), targets.split(16), strict=True)
    ]
    generic_values = torch.cat(chunks)
    (generic_values * upstream(1 + entropy)).sum().backward()
    torch.testing.assert_close(generic_values.detach(), values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows.grad, d_rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, d_weight, rtol=1e-5, atol=1e-6)


def test_columns_that_pad_the_vocabulary_are_ignored() -> None:
    rows, weight, targets = inputs()
    real = V - 11
    settings = head(True, real=real)
    targets %= real
    values = run(rows, weight, targets, settings, upstream(2))
    expected, d_rows, d_weight = in_fp64(rows, weight, targets, settings, upstream(2))
    assert error(values, expected) < 1e-6 and error(rows.grad, d_rows) < 1e-6 and error(weight.grad, d_weight) < 1e-6
    assert weight.grad is not None and torch.equal(weight.grad[real:], torch.zeros(11, H))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_extreme_logits_stay_finite(trained: bool, entropy: bool) -> None:
    rows, weight, targets = inputs()
    rows = (rows.detach() * 1e4).requires_grad_()
    weight.requires_grad_(trained)
    values = run(rows, weight, targets, head(entropy), upstream(1 + entropy))
    assert values.abs().max() > 1e4 and values.isfinite().all()
    assert rows.grad is not None and rows.grad.isfinite().all()
    assert not trained or (weight.grad is not None and weight.grad.isfinite().all())


@pytest.mark.parametrize("entropy", [False, True])
def test_nan_in_a_row_makes_its_values_nan(entropy: bool) -> None:
    rows, weight, targets = inputs()
    with torch.no_grad():
        rows[3, 0] = torch.nan
    values = run(rows, weight, targets, head(entropy), upstream(1 + entropy))
    assert values[3].isnan().all() and values.isnan().any(-1).sum() == 1


# ------------------------------------------------------------------------------------------ Megatron's gradient buffer


def test_micro_batches_accumulate_into_main_grad_and_autograd_gets_zeros() -> None:
    rows, weight, targets = inputs()
    before = torch.randn(V, H)
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for _ in range(2):
        run(rows, weight, targets, head(False), upstream(1))
        assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(V, H))
    _, _, d_weight = in_fp64(rows, weight, targets, head(False), upstream(1))
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert error(weight.main_grad - before, 2 * d_weight) < 2e-6  # type: ignore[attr-defined]


def test_a_bf16_main_grad_is_accumulated_by_ddp() -> None:
    rows, weight, targets = inputs(torch.bfloat16)
    weight.main_grad = torch.zeros(V, H, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    run(rows, weight, targets, head(False), upstream(1))
    _, d_weight = rounded_like_bf16(rows, weight, targets, head(False), upstream(1))
    assert not weight.grad_added_to_main_grad and not weight.main_grad.any()  # type: ignore[attr-defined]
    assert error(weight.grad, d_weight.bfloat16().double()) < 1e-3


@pytest.mark.parametrize("ddp", [False, True])
def test_a_weight_tied_to_the_embedding_gets_both_gradients(ddp: bool) -> None:
    _, weight, targets = inputs()
    tokens = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(2))
    exact = weight.detach().double().requires_grad_()
    values = reference(F.embedding(tokens, exact) @ exact.T, targets, 0.9)[:, :1]
    (values * upstream(1).double()).sum().backward()
    assert exact.grad is not None

    if ddp:
        weight.main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    logprobs = fused_log_probs(F.embedding(tokens, weight), weight, targets, head(False))
    (logprobs * upstream(1)).sum().backward()
    gradient = weight.grad
    if ddp:  # as DDP's hook does for a weight marked zero_out_wgrad
        gradient = weight.main_grad + weight.grad  # type: ignore[attr-defined]
    assert error(gradient, exact.grad) < 1e-6


# ------------------------------------------------------------------------------------------- tensor-parallel arithmetic


@pytest.mark.parametrize("entropy", [False, True])
def test_ranks_with_parts_of_the_vocabulary_agree_with_one_that_has_all(entropy: bool) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(33, 120) * 5, torch.randint(0, 118, (33,))
    grad = upstream(1 + entropy, 33)
    whole = Vocabulary(0, 118, 0.8, None)
    expected = combine([sums_of_rows(logits, targets, whole, entropy)], 0.8)
    parts = [replace(whole, first=first, real=max(0, min(30, 118 - first))) for first in (0, 30, 60, 90)]
    columns = logits.split(30, dim=1)
    sums = [sums_of_rows(c, targets, p, entropy) for c, p in zip(columns, parts, strict=True)]
    combined = combine(sums, 0.8)
    torch.testing.assert_close(combined.columns(), expected.columns(), rtol=1e-6, atol=2e-6)
    gradients = [to_gradient_(c.clone(), targets, combined, grad, p) for c, p in zip(columns, parts, strict=True)]
    torch.testing.assert_close(
        torch.cat(gradients, 1), to_gradient_(logits.clone(), targets, expected, grad, whole), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("entropy", [False, True])
def test_a_rank_that_holds_only_padding_changes_no_value(entropy: bool) -> None:
    logits, targets = torch.randn(5, 12), torch.randint(0, 12, (5,))
    whole, nothing = Vocabulary(0, 12, 0.7, None), Vocabulary(12, 0, 0.7, None)
    sums = sums_of_rows(logits, targets, whole, entropy)
    padding = sums_of_rows(torch.randn(5, 12), targets, nothing, entropy)
    alone, both = combine([sums], 0.7), combine([sums, padding], 0.7)
    assert torch.equal(alone.columns(), both.columns())
    assert not to_gradient_(torch.randn(5, 12), targets, both, torch.ones(5, 1 + entropy), nothing).any()
