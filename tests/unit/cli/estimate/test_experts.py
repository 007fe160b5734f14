"""Estimates of rows that leave a rank are compared with counts of experts that are drawn."""

from __future__ import annotations

import random

import pytest

from swift_megatron_grpo.cli.estimate.activations import share_of_fullest
from swift_megatron_grpo.cli.estimate.throughput import rows_that_leave


@pytest.mark.parametrize(("experts", "taken", "ranks"), [(128, 8, 4), (128, 8, 2), (64, 6, 8), (8, 1, 4)])
def test_rows_leave_for_the_other_ranks_on_which_a_token_has_experts(experts: int, taken: int, ranks: int) -> None:
    generator, of_a_rank, tokens = random.Random(0), experts // ranks, 20000
    leaving = 0
    for token in range(tokens):
        chosen = {expert // of_a_rank for expert in generator.sample(range(experts), taken)}
        leaving += len(chosen - {token % ranks})
    assert rows_that_leave(experts, taken, ranks) == pytest.approx(leaving / tokens, rel=0.02)


def test_ranks_with_many_experts_have_more_even_rows() -> None:
    assert share_of_fullest(128, 1) == share_of_fullest(0, 4) == 1
    assert 1 < share_of_fullest(128, 2) < share_of_fullest(128, 4) < share_of_fullest(64, 4)
