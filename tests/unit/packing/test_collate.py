"""A plan assigns every sample once, and a packed micro batch holds the same tokens with every context-parallel size."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment, padded_lengths, plan_by_count, zigzag_positions
from swift_megatron_grpo.types import Sample

CPU = torch.device("cpu")


def make_samples(shapes: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [
        Sample(
            tokens=[rng.randrange(1, 1000) for _ in range(prompt + completion)],
            completion_mask=[False] * prompt + [True] * completion,
            advantage=rng.gauss(0, 1),
            old_logprobs=[-rng.random() for _ in range(completion)],
        )
        for prompt, completion in shapes
    ]


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=6)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_every_sample_is_assigned_once_and_counts_are_equal(dp: int, micro: int, accumulation: int) -> None:
    plan = plan_by_count(dp * micro * accumulation, dp, micro)
    assigned = [i for rank in plan.assignment for batch in rank for i in batch]
    assert sorted(assigned) == list(range(dp * micro * accumulation))
    assert {len(rank) for rank in plan.assignment} == {accumulation} == {plan.num_micro_batches}


def test_a_sample_count_that_cannot_be_split_is_refused_with_a_multiple() -> None:
    with pytest.raises(ValueError, match="positive multiple of 6"):
        plan_by_count(10, dp_size=2, micro_batch_size=3)


@given(shapes, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_padding_meets_the_multiples_of_the_layout(
    sizes: list[tuple[int, int]], cp: int, tp: int, sequence_parallel: bool
) -> None:
    align = Alignment.of_layout(tp, cp, sequence_parallel)
    lengths = [p + c for p, c in sizes]
    padded = padded_lengths(lengths, align)
    assert all(b >= a for a, b in zip(lengths, padded, strict=True))
    assert cp == 1 or all(b % (2 * cp) == 0 for b in padded)
    assert sum(padded) % (cp * (tp if sequence_parallel else 1)) == 0
    assert sum(padded) - sum(lengths) < len(lengths) * align.sequence + align.total


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_zigzag_assigns_every_position_once_and_each_rank_equally_many(pieces: list[int], cp: int) -> None:
    lengths = [piece * 2 * cp for piece in pieces]
    held = [zigzag_positions(lengths, rank, cp) for rank in range(cp)]
    assert sorted(i for rank in held for i in rank) == list(range(sum(lengths)))
    assert len({len(rank) for rank in held}) == 1


@given(shapes, st.sampled_from([1, 2, 4]))
def test_rows_predict_their_targets_and_all_ranks_together_hold_every_row(
    sizes: list[tuple[int, int]], cp: int
) -> None:
    samples = make_samples(sizes)
    align = Alignment.of_layout(tp_size=1, cp_size=cp, sequence_parallel=False)
    indices = range(len(samples))
    ranks = [collate(samples, indices, count(samples), align, rank, cp, CPU) for rank in range(cp)]

    # (position of the row within its sequence, target), in the order of the micro batch
    values = torch.cat([rank.inputs.head_targets for rank in ranks])[ranks[0].inputs.cp_order]
    rows = torch.cat([rank.inputs.position_ids[0][rank.inputs.head_positions] for rank in ranks])
    rebuilt = list(zip(rows[ranks[0].inputs.cp_order].tolist(), values.tolist(), strict=True))
    expected = [
        (i - 1, token)
        for sample in samples
        for i, (token, trained) in enumerate(zip(sample.tokens, sample.completion_mask, strict=True))
        if trained
    ]
    assert rebuilt == expected
    assert ranks[0].lengths.tolist() == [c for _, c in sizes]
    assert ranks[0].advantages.tolist() == pytest.approx([s.advantage for s in samples for _ in (s.old_logprobs or [])])
    assert sum(ranks[0].inputs.cp_counts) == len(expected)


def test_the_input_of_each_row_is_the_token_before_its_target() -> None:
    samples = make_samples([(3, 4), (2, 1)])
    batch = collate(samples, [1, 0], count(samples), Alignment(1, 1), 0, 1, CPU)
    inputs = batch.inputs.input_ids[0][batch.inputs.head_positions].tolist()
    expected = [
        sample.tokens[i - 1] for sample in (samples[1], samples[0]) for i, m in enumerate(sample.completion_mask) if m
    ]
    assert inputs == expected
    assert batch.inputs.cu_seqlens.tolist() == [0, 3, 10]


def test_normalisers_count_the_whole_step() -> None:
    samples = make_samples([(1, 3), (2, 0), (4, 5)])
    step = count(samples)
    assert (step.sequences, step.tokens) == (2, 8)


def test_groups_are_counted_whatever_their_numbers() -> None:
    samples = make_samples([(3, 2)] * 5)
    for sample, group in zip(samples, (-9, 4, -9, 0, 4), strict=True):
        sample.group = group
    assert count(samples).loss_groups == 3 and count([]).loss_groups == 0


def test_a_trained_first_token_is_refused() -> None:
    sample = Sample(tokens=[1, 2], completion_mask=[True, True], advantage=0.0)
    with pytest.raises(ValueError, match="a prompt needs at least one token"):
        collate([sample], [0], count([sample]), Alignment(1, 1), 0, 1, CPU)


def test_log_probs_of_the_wrong_length_are_refused() -> None:
    samples = make_samples([(2, 3), (2, 2)])
    samples[1].old_logprobs = [0.0]
    with pytest.raises(ValueError, match="old log-probs: 1 given for a completion of 2"):
        collate(samples, [0, 1], count(samples), Alignment(1, 1), 0, 1, CPU)
