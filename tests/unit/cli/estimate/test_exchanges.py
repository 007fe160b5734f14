"""Seconds of exchanges are compared with counts of what layers send."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.throughput import (
    ROWS_GB,
    TENSOR_GB,
    PassCounts,
    StepWork,
    rows_that_leave,
    seconds_of_exchanges,
)
from swift_megatron_grpo.settings.layout import Layout

DECODER = Decoder(4, 64, 64, 64, 0, 256, False, experts=8, expert_layers=frozenset([1, 2, 3]), experts_per_token=2)
WORK = StepWork(1.0, 0.0, tokens=1000, completion_tokens=0)


@pytest.mark.parametrize(
    ("passes", "transfers"), [(PassCounts(), 4), (PassCounts(recomputes=True), 6), (PassCounts(forward_only=2), 8)]
)
def test_rows_go_to_experts_and_back_in_every_pass(passes: PassCounts, transfers: int) -> None:
    layout = Layout(4, expert_model_parallel_size=4)
    once = 250 * 3 * rows_that_leave(8, 2, 4) * 64 * 2 / (ROWS_GB * 1e9)
    assert seconds_of_exchanges(WORK, DECODER, layout, passes, item=2) == pytest.approx(once * transfers)


@pytest.mark.parametrize(
    ("passes", "transfers"), [(PassCounts(), 5), (PassCounts(recomputes=True), 7), (PassCounts(forward_only=2), 9)]
)
def test_tensor_ranks_gather_and_reduce_in_attention_and_in_dense_layers(passes: PassCounts, transfers: int) -> None:
    """Each of two ranks of a group gets half of the tokens from the other one, in 4 + 1 blocks."""
    layout = Layout(4, tensor_model_parallel_size=2, sequence_parallel=True)
    once = 500 / 2 * (4 + 1) * 64 * 2 / (TENSOR_GB * 1e9)
    assert seconds_of_exchanges(WORK, DECODER, layout, passes, item=2) == pytest.approx(once * transfers)


def test_pipeline_stages_divide_what_tensor_ranks_exchange() -> None:
    sizes = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    alone, piped = Layout(2, **sizes), Layout(4, pipeline_model_parallel_size=2, **sizes)
    one, two = (seconds_of_exchanges(WORK, DECODER, layout, PassCounts(), item=2) for layout in (alone, piped))
    assert one == pytest.approx(2 * two)


def test_data_parallel_ranks_exchange_no_activations() -> None:
    assert seconds_of_exchanges(WORK, DECODER, Layout(4), PassCounts(), item=2) == 0
