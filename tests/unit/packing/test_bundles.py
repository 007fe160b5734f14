"""Plans with shared prompts: budgets, ranks, work, and the time that planning takes."""

from __future__ import annotations

import random
import re
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.packing.bundles import Bundles, SampleWork, gain_of, plan_with_shared_prompts
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import plan_by_count, plan_by_tokens
from tests.paths import REPOSITORY
from tests.unit.packing.test_plan import PLAIN, SMALL


def step(groups: int, size: int, prompt: int, completion: int, seed: int = 0) -> SampleWork:
    """Return the work of a step with completions of random lengths around `completion`."""
    rng = random.Random(seed)
    completions = [rng.randint(completion // 2, completion * 3 // 2) for _ in range(groups * size)]
    return work_of([prompt + c for c in completions], completions, SMALL, shared(groups, size, prompt))


def work_of(lengths: list[int], completions: list[int], cost: FlopsModel, shared: list[int]) -> SampleWork:
    return SampleWork(np.array(lengths), np.array(completions), None, cost, np.array(shared))


def shared(groups: int, size: int, prompt: int) -> list[int]:
    return [0, *[prompt] * (size - 1)] * groups


def packed(batch: tuple[int, ...], size: int, prompt: int, work: SampleWork) -> int:
    """Return the tokens of a micro batch in which groups of one size have their prompt once."""
    return sum(work.completions[i] for i in batch) + prompt * len({i // size for i in batch})


@given(
    groups=st.integers(1, 8),
    size=st.integers(1, 9),
    prompt=st.integers(1, 60),
    ranks=st.sampled_from([1, 2, 4]),
    budget=st.integers(70, 400),
    multiple=st.sampled_from([1, 2]),
)
def test_every_sample_is_in_one_micro_batch_that_fits(
    groups: int, size: int, prompt: int, ranks: int, budget: int, multiple: int
) -> None:
    size = max(size, -(-ranks * multiple // groups))
    work = step(groups, size, prompt, 20)
    plan = plan_with_shared_prompts(work, ranks, budget, multiple).plan
    if plan is None:  # every completion fills a micro batch, or there are as many groups as samples
        return
    batches = [batch for rank in plan.assignment for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(groups * size)) and all(batches)
    assert {len(rank) for rank in plan.assignment} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple == 0
    for batch in batches:
        assert packed(batch, size, prompt, work) <= budget or set(batch) <= set(plan.over_budget)


def test_long_prompts_fill_fewer_micro_batches_with_less_work() -> None:
    work = step(16, 8, 2048, 512)
    shared = plan_with_shared_prompts(work, 1, 16384, 1)
    repeated = plan_by_tokens(work.lengths, 1, 16384, SMALL, PLAIN, 1, work.completions)
    assert shared.plan is not None and shared.plan.num_micro_batches < 0.45 * repeated.num_micro_batches
    assert 1 / (1 - shared.gain) == pytest.approx(2.9, abs=0.35)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_nearly_equal_work(ranks: int) -> None:
    work = step(16, 8, 2048, 512, seed=ranks)
    shared = plan_with_shared_prompts(work, ranks, 16384, 1)
    total = work.flops(work.groups()).sum()
    assert shared.shared < 1.12 * total / ranks


def test_a_group_is_cut_where_ranks_would_wait_for_it() -> None:
    work = step(3, 8, 64, 512)
    shared = plan_with_shared_prompts(work, 2, 16384, 1)
    assert shared.shared < 1.1 * work.flops(work.groups()).sum() / 2


def test_a_group_above_the_budget_is_cut_into_equal_parts() -> None:
    work = work_of([100 + 50] * 8, [50] * 8, FlopsModel(1.0, 0.0), shared(1, 8, 100))
    plan = plan_with_shared_prompts(work, 1, 320, 1).plan
    assert plan is not None and plan.assignment == (((0, 1, 2, 3), (4, 5, 6, 7)),) and plan.over_budget == ()


def test_prompts_that_save_nothing_are_repeated() -> None:
    work = work_of([10, 12, 14, 16], [5, 6, 7, 8], SMALL, [0] * 4)
    result = plan_with_shared_prompts(work, 2, 64, 1)
    assert result.plan is None and result.gain == 0


def test_images_of_a_bundle_count_once() -> None:
    work = work_of([20] * 4, [5] * 4, FlopsModel(1.0, 0.0), shared(1, 4, 15))
    work = replace(work, images=np.full(4, 100.0))
    assert work.flops(work.groups()) == 15 + 4 * 5 + 100.0
    result = plan_with_shared_prompts(work, 1, 100, 1)
    assert (result.shared, result.repeated) == (135.0, 4 * 120.0)


def test_the_gain_of_micro_batches_by_count() -> None:
    work = replace(step(2, 8, 1000, 100), cost=FlopsModel(1.0, 0.0))
    assert gain_of(plan_by_count(16, 1, 1), work).gain == 0
    by_four = gain_of(plan_by_count(16, 1, 4), work)
    assert by_four.repeated - by_four.shared == 4 * 3 * 1000
    assert gain_of(plan_by_count(16, 2, 8), work).gain > by_four.gain


def test_a_tree_counts_what_branches_share_once() -> None:
    """Two conversations of a prompt of 10 tokens; the second one has two sequences that share 30."""
    work = work_of([25, 40, 50], [15, 10, 20], FlopsModel(1.0, 0.0), [0, 10, 30])
    assert work.groups().count == [3] and work.tokens(work.groups()) == [10 + 15 + 20 + 10 + 20]
    assert work.flops(work.groups()) == work.tokens(work.groups())
    parts = Bundles(np.array([0, 1]), np.array([1, 2]))
    assert work.tokens(parts).tolist() == [25, 60] and work.alone().tolist() == [25, 40, 50]


def test_the_page_has_the_flops_that_sharing_saves() -> None:
    sizes = {"vocab_size": 151936, "kv_channels": 128}
    models = [
        FlopsModel.of_transformer(num_layers=28, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16,
                                  num_query_groups=8, **sizes),
        FlopsModel.of_transformer(num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32,
                                  num_query_groups=8, **sizes),
        FlopsModel.of_transformer(num_layers=48, hidden_size=2048, ffn_hidden_size=8 * 768, num_attention_heads=32,
                                  num_query_groups=4, **sizes),
    ]  # fmt: skip
    lines = (REPOSITORY / "docs" / "shared_prompts.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ / \d+ / \d+ \|", line)]
    assert len(rows) == 5
    for where, *cells in rows:
        prompt, completion, size = map(int, where.split(" / "))
        tokens = size * (prompt + completion) / (prompt + size * completion)
        works = [
            work_of([prompt + completion] * size, [completion] * size, model, shared(1, size, prompt))
            for model in models
        ]
        saved = [work.alone().sum() / work.flops(work.groups()).item() for work in works]
        assert cells == [f"{value:.2f}" for value in (tokens, *saved)], where


def test_flops_of_a_bundle_are_those_of_its_tokens() -> None:
    model, prompt, completions = FlopsModel(3.0, 2.0, 5.0), 7, [2, 4]
    seen = sum(range(1, prompt + 1)) + sum(prompt + i for c in completions for i in range(1, c + 1))
    tokens = prompt + sum(completions)
    # The model counts t * t for the pairs of a causal mask, which has t * (t + 1) / 2.
    work = work_of([prompt + c for c in completions], completions, model, [0, prompt])
    assert work.flops(work.groups()) == 3.0 * tokens + 2.0 * (2 * seen - tokens) + 30


@pytest.mark.alone
def test_4096_samples_are_planned_quickly() -> None:
    """The bound on an idle machine is 50 ms; the test allows three times that."""
    work = step(512, 8, 1024, 700)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        plan_with_shared_prompts(work, 8, 16384, 1)
        seconds.append(time.process_time() - began)
    assert statistics.median(seconds) < 0.15, seconds
