"""Estimates of rows that leave a rank are compared with counts of experts that are drawn."""

from __future__ import annotations

import random

import pytest

from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.planning.activations import Decoder
from swift_megatron_grpo.planning.experts import rows_that_leave, share_of_fullest
from swift_megatron_grpo.planning.throughput import EXCHANGED_GB, StepWork, seconds_of_exchanges

DECODER = Decoder(4, 64, 64, 64, 0, 256, False, experts=8, expert_layers=frozenset([1, 2, 3]), experts_per_token=2)


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


def test_rows_go_to_other_ranks_and_back_in_every_pass_of_every_layer_with_experts() -> None:
    work, layout = StepWork(0.0, tokens=1000, completion_tokens=0), Layout(4, expert_model_parallel_size=4)
    once = 250 * 3 * rows_that_leave(8, 2, 4) * 64 * 2 / (EXCHANGED_GB * 1e9)
    for recomputes, passes, transfers in ((False, 0, 4), (True, 0, 6), (False, 2, 8)):
        seconds = seconds_of_exchanges(work, DECODER, layout, item=2, recomputes=recomputes, passes=passes)
        assert seconds == pytest.approx(once * transfers)
    assert seconds_of_exchanges(work, DECODER, Layout(4), item=2, recomputes=False, passes=0) == 0
