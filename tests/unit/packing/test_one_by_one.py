"""Plans in arrays are those of plain Python, micro batch by micro batch."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from swift_megatron_grpo.packing.bundles import SampleWork, plan_with_shared_prompts
from swift_megatron_grpo.packing.plan import Alignment, plan_by_tokens
from tests.unit.packing import one_by_one
from tests.unit.packing.test_plan import SMALL

CASES = 250


def draw_lengths(rng: random.Random, room: int, least: int) -> list[int]:
    """Return lengths of one of the kinds that steps have: like each other, with a long tail, or equal."""
    number = least + rng.choice([0, 1, least, 5 * least]) + rng.randrange(4)
    kind = rng.random()
    if kind < 0.1:
        return [rng.randrange(1, room + 2)] * number
    if kind < 0.4:
        return [rng.randrange(1, room + 2) for _ in range(number)]
    return [max(1, round(rng.lognormvariate(0, 0.9) * room / rng.choice([3, 10, 30]))) for _ in range(number)]


@pytest.mark.parametrize("seed", range(8))
def test_samples_are_planned_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        ranks, multiple = rng.choice([1, 1, 2, 3, 8, 17]), rng.choice([1, 1, 2, 3])
        align = rng.choice([Alignment(1, 1), Alignment(2, 2), Alignment(1, 4), Alignment(4, 8)])
        budget = rng.choice([9, 40, 300])
        lengths = draw_lengths(rng, budget, ranks * multiple)
        heads = [rng.randrange(length + 1) for length in lengths]
        plan = plan_by_tokens(lengths, ranks, budget, SMALL, align, multiple, heads)
        padded = [-(-length // align.sequence) * align.sequence for length in lengths]
        work = [SMALL.of_sequence(tokens, head) for tokens, head in zip(padded, heads, strict=True)]
        room = max(budget // align.total, 1) * align.total
        expected = one_by_one.plan_items(padded, work, ranks, room, multiple)
        assert (plan.assignment, plan.over_budget) == expected, (lengths, heads, ranks, multiple, budget, align)


@pytest.mark.parametrize("seed", range(4))
def test_groups_that_share_prompts_are_planned_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        ranks, multiple = rng.choice([1, 2, 3, 8]), rng.choice([1, 1, 2])
        room = rng.choice([40, 300])
        lengths: list[int] = []
        shared: list[int] = []
        while len(lengths) < ranks * multiple or rng.random() < 0.8:
            size, prompt = rng.choice([1, 2, 4, 8, 9]), rng.randrange(1, room // 2)
            lengths += [prompt + rng.randrange(1, room // 4) for _ in range(size)]
            branches = rng.random() < 0.3  # neighbours also share trained tokens
            pairs = pairwise(lengths[-size:])
            shared += [0, *(rng.randrange(prompt, min(pair)) if branches else prompt for pair in pairs)]
        heads = [rng.randrange(length) for length in lengths]
        work = SampleWork(np.array(lengths), np.array(heads), None, SMALL, np.array(shared))
        plan = plan_with_shared_prompts(work, ranks, room, multiple).plan
        expected = one_by_one.plan_sharing(lengths, heads, shared, SMALL, ranks, room, multiple)
        assert (plan and (plan.assignment, plan.over_budget)) == expected, (lengths, heads, shared, ranks, multiple)


def test_64_ranks_are_planned_as_one_by_one() -> None:
    rng = random.Random(0)
    lengths = [max(1, min(4096, round(700 * rng.lognormvariate(0, 0.9)))) for _ in range(64 * 12)]
    plan = plan_by_tokens(lengths, 64, 16384, SMALL, Alignment(1, 1))
    work = [SMALL.of_sequence(length, length) for length in lengths]
    assert (plan.assignment, plan.over_budget) == one_by_one.plan_items(lengths, work, 64, 16384, 1)
