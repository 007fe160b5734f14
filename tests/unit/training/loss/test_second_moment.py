"""M2PO's mask against its definition in fp64: the tokens that have moved farthest leave until the mean is in bounds."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.loop.samples import mask_tokens, squared_log_ratios
from swift_megatron_grpo.training.loss.correction import second_moment_limit
from swift_megatron_grpo.types import Sample

# Multiples of 1/64, whose squares and sums are exact: their mean is on the threshold, or on one side of it.
LOG_RATIOS = st.lists(st.lists(st.integers(-128, 128).map(lambda n: n / 64), max_size=9), min_size=1, max_size=8)


def kept_by_definition(log_ratios: list[float], threshold: float) -> list[bool]:
    """Remove the largest squares, equal ones together, until the mean of the others is below the threshold."""
    squares = [Fraction(ratio) ** 2 for ratio in log_ratios]
    kept = set(range(len(squares)))
    while kept and sum(squares[i] for i in kept) / len(kept) >= Fraction(threshold):
        largest = max(squares[i] for i in kept)
        kept -= {i for i in kept if squares[i] == largest}
    return [i in kept for i in range(len(squares))]


@given(LOG_RATIOS, st.sampled_from([2.0**-12, 0.04, 0.25, 1.0, 5.0]), st.integers(0, 99))
def test_the_mask_is_that_of_its_definition_in_any_layout(rows: list[list[float]], threshold: float, seed: int) -> None:
    expected = kept_by_definition([ratio for row in rows for ratio in row], threshold)
    limit = second_moment_limit([np.square(row) for row in rows], threshold)
    masked = [square < limit for row in rows for square in np.square(row)]
    assert masked == expected
    Random(seed).shuffle(rows)
    assert second_moment_limit([np.square(row) for row in rows], threshold) == limit


def test_without_tokens_or_outliers_nothing_is_masked() -> None:
    assert second_moment_limit([], 0.04) == second_moment_limit([np.zeros(0)], 0.04) == math.inf
    assert second_moment_limit([np.full(3, 0.01)], 0.04) == math.inf
    assert second_moment_limit([np.full(3, 0.09)], 0.04) == 0.09  # all have moved too far


def test_one_outlier_of_a_long_step_is_masked_alone() -> None:
    squares = [np.full(1000, 0.01), np.array([9.0, 50.0])]
    assert second_moment_limit(squares, 0.04) == 50.0
    assert second_moment_limit(squares, 0.015) == 9.0


def test_masks_of_entropy_and_of_second_moment_are_both_in_force() -> None:
    sample = Sample([1, 2, 3, 4], [False, True, True, True], 0.0, rollout_logprobs=[-1.0, -1.0, -4.0])
    squares = squared_log_ratios(sample, [-1.5, -1.0, -1.0])
    assert squares.tolist() == [0.25, 0.0, 9.0]
    mask_tokens(sample, squares, 9.0)
    assert sample.selected == [True, True, False]
    sample.selected = [False, True, True]
    mask_tokens(sample, squares, 9.0)
    assert sample.selected == [False, True, False]


def test_completions_without_log_probs_of_the_engine_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"--m2_threshold compares .* --rollout_replay, use a folder with logprobs"):
        squared_log_ratios(Sample([1, 2], [False, True], 0.0), [-1.0])
