"""The number of rows in a chunk, and the peak memory of the head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_head import peak_bytes
from swift_megatron_grpo.training.head.fused import Head, fused_log_probs, rows_per_chunk
from swift_megatron_grpo.training.head.row_statistics import Vocabulary

H, V, CHUNK = 8, 10_000, 32


def test_on_cuda_a_chunk_of_a_large_vocabulary_has_4k_to_8k_rows() -> None:
    for rows in (16_384, 65_536, 1_000_000):
        assert 4096 <= rows_per_chunk(rows, 151_936, torch.bfloat16, on_cuda=True) <= 8192


@given(
    rows=st.integers(0, 100_000),
    columns=st.integers(1, 300_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    on_cuda=st.booleans(),
)
def test_chunks_are_within_bounds_and_about_equal(rows: int, columns: int, dtype: torch.dtype, on_cuda: bool) -> None:
    size = rows_per_chunk(rows, columns, dtype, on_cuda)
    tile = 128 if on_cuda else 1
    bound = 5 * 2**28 if on_cuda else 2**28
    assert size >= 1 and size % tile == 0
    assert size == tile or size * columns * dtype.itemsize <= bound
    if rows > size:
        last = rows % size or size
        assert size - last <= tile * -(-rows // size)  # the difference that rounding up to whole tiles makes


def peak(k: int, trained: bool, entropy: bool) -> int:
    rows = torch.randn(k, H).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(V, H), requires_grad=trained)
    head = Head(Vocabulary(0, V, 1.0, None), entropy, CHUNK)
    targets = torch.randint(0, V, (k,))
    return peak_bytes(lambda: fused_log_probs(rows, weight, targets, head).sum().backward())


@pytest.mark.parametrize(("trained", "entropy"), [(True, True), (False, False)])
def test_memory_does_not_grow_with_rows_times_vocabulary(trained: bool, entropy: bool) -> None:
    small, large = peak(2 * CHUNK, trained, entropy), peak(32 * CHUNK, trained, entropy)
    logits = 30 * CHUNK * V * 4  # of the additional rows of `large`
    assert large - small < 0.01 * logits
    assert small > CHUNK * V * 4  # the measurement includes the logits of a chunk


def test_the_measurement_includes_logits_that_are_kept() -> None:
    rows, weight = torch.randn(2048, H).requires_grad_(), torch.nn.Parameter(torch.randn(V, H))
    measured = peak_bytes(lambda: (rows @ weight.T).log_softmax(-1)[:, 0].sum().backward())
    assert measured > 2 * 2048 * V * 4
