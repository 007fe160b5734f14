"""Sequences that fill micro batches of a fixed size."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.packing.collate import count, num_completions
from swift_megatron_grpo.packing.filling import filled
from swift_megatron_grpo.packing.plan import plan_by_count
from swift_megatron_grpo.types import Sample


def sample(number: int) -> Sample:
    return Sample([5, 6, number], [False, False, True], 1.0, completion=number // 2, ref_logprobs=[-1.0])


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_gets_full_micro_batches_and_given_samples(number: int, ranks: int, micro: int) -> None:
    multiple = ranks * micro
    samples = [sample(i) for i in range(number)]
    result = filled(samples, multiple)
    assert [result.samples[place] for place in result.places] == samples
    if number < multiple:
        assert len(result.samples) == number  # too few for the layout, which the planner says
        return
    assert len(result.samples) % multiple == 0 and len(result.samples) - number < multiple
    for of_rank in plan_by_count(len(result.samples), ranks, micro).samples_of_ranks():
        assert {*of_rank} & {*result.places}


def test_what_is_added_counts_nowhere() -> None:
    samples = [sample(i) for i in range(5)]
    result = filled(samples, 4)
    assert len(result.samples) == 8 and asdict(count(result.samples)) == asdict(count(samples))
    answer = Sample([5, 6], [False, True], 0.0, sft_weights=[1.0])
    assert num_completions([*samples, answer]) == 3 and count(samples).tokens_of == {0: 2, 1: 2}  # 2 has one
    added = next(each for place, each in enumerate(result.samples) if place not in result.places)
    assert added.ref_logprobs == [] and added.old_logprobs is None  # as the loss needs them of all samples


def test_values_return_under_the_numbers_of_the_given_samples() -> None:
    result = filled([sample(i) for i in range(3)], 2)
    by_place = {place: place * 10 for place in range(4) if place != result.places[1]}  # another rank has that one
    assert result.of_given(by_place) == {0: result.places[0] * 10, 2: result.places[2] * 10}
