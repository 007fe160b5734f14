"""The largest micro batch of a planned step, and its images; those too that a rank keeps for a rollout."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swift_megatron_grpo.cli.check.micro_batches import AnswerBatches, fullest, media_tokens_of
from swift_megatron_grpo.cli.estimate.activations import MediaTokens, Tokens
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, plan_by_tokens
from swift_megatron_grpo.settings.batches import BatchSizes, MicroBatches
from swift_megatron_grpo.settings.layout import Layout
from tests.unit.settings.flags import of

BATCH = BatchSizes(Layout(2), 1, 8, 16, 2, num_generations=2)
TOKENS = [10, 10, 0, 0, 30, 30, 40, 40]  # of the images of each sample's prompt
# Completions of the third prompt are on both ranks.
PLAN = StepPlan([[[0, 1, 4], [2, 3]], [[5, 6], [7]]])


def test_an_image_counts_once_per_rank_and_per_use_in_a_micro_batch() -> None:
    assert media_tokens_of(PLAN, BATCH, TOKENS) == MediaTokens(shown=70, distinct=70, of_rollout=2 * 70)
    alone = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]])
    assert media_tokens_of(alone, BATCH, TOKENS) == MediaTokens(shown=80, distinct=40, of_rollout=2 * 70)


def test_completions_that_share_a_prompt_show_its_image_once() -> None:
    plan = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]], share_prompts=True)
    assert media_tokens_of(plan, BATCH, TOKENS) == MediaTokens(shown=40, distinct=40, of_rollout=2 * 70)


def test_prompts_without_images_need_nothing() -> None:
    assert media_tokens_of(PLAN, BATCH, [0] * 8) == MediaTokens()


PAIRS = StepPlan([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
SAMPLES = [(2176, 2048)] * 8


def most(plan: StepPlan, budget: int | None, layout: Layout | None = None) -> int:
    largest = Tokens(*(sum(sample[part] for sample in SAMPLES[:2]) for part in (0, 0, 1)))
    batch = replace(BATCH, layout=layout or Layout(2))
    packing = of(MicroBatches, max_tokens_per_micro_batch=budget, share_prompts="false")
    return fullest(plan, largest, batch, packing, SAMPLES)


def test_shorter_completions_fill_a_budget_that_full_ones_leave_empty() -> None:
    assert most(PAIRS, 6144) == 6144
    with_sequence_parallel = Layout(8, tensor_model_parallel_size=4, sequence_parallel=True)
    assert most(PAIRS, 6143, with_sequence_parallel) == 6140  # padded to a multiple of 4


def test_a_micro_batch_has_no_more_tokens_than_its_rank() -> None:
    assert most(PAIRS, 16384) == 4 * 2176
    alone = replace(PAIRS, assignment=[[[0, 1]], [[4, 5]]])
    assert most(alone, 16384) == 2 * 2176
    shared = replace(PAIRS, share_prompts=True)  # of groups of two
    assert most(shared, 16384) == 2 * (2 * 2048 + 128)


def test_samples_over_budget_and_micro_batches_by_count_stay_as_planned() -> None:
    assert most(PAIRS, 2048) == most(PAIRS, None) == 2 * 2176


FLOPS = FlopsModel.of_transformer(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=512, num_query_groups=2,
    kv_channels=16, gated_linear_unit=True,
)  # fmt: skip
ANSWERS = [(300, 100), (900, 800), (200, 150), (700, 100), (400, 300), (100, 90)]


@pytest.mark.parametrize("budget", [None, 512, 1024, 4096])
def test_no_micro_batch_of_answers_is_larger_than_the_one_of_the_plan(budget: int | None) -> None:
    """Whichever answers a step takes; and the steps that take the longest ones reach it."""
    layout, of_step = Layout(2), 8
    planned = AnswerBatches.plan(ANSWERS, of_step, together=2, layout=layout, budget=budget)
    largest = []
    for seed in range(300):
        order = random.Random(seed).sample(ANSWERS, len(ANSWERS))
        taken = (order + order)[:of_step]
        lengths = [tokens for tokens, _ in taken]
        if budget is None:
            plan = plan_by_count(of_step, 2, 2)
        else:
            plan = plan_by_tokens(lengths, 2, budget, FLOPS, Alignment.of_layout(1, 1, False))
        for part in (part for rank in plan.assignment for part in rank):
            largest.append((sum(lengths[place] for place in part), sum(taken[place][1] for place in part)))
    assert max(packed for packed, _ in largest) <= planned.largest.packed
    assert max(trained for _, trained in largest) <= planned.largest.trained
    assert max(packed for packed, _ in largest) > 0.75 * planned.largest.packed
    assert planned.longest == 900 and len(planned.of_step) == of_step


def test_a_rank_needs_memory_for_its_largest_micro_batch_of_either_kind() -> None:
    answers = AnswerBatches.plan(ANSWERS, 4, together=1, layout=Layout(1), budget=None)
    assert answers.joined(Tokens(500, 800, 400)) == Tokens(900, 900, 800)
    assert answers.joined(Tokens(2000, 2500, 1000)) == Tokens(2000, 2500, 1000)
