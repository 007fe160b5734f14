"""Images of a planned step: those of its largest micro batch, and those that a rank keeps for a rollout."""

from __future__ import annotations

from dataclasses import replace

from swift_megatron_grpo.config import BatchPlan
from swift_megatron_grpo.dry_run.micro_batches import pictures_of
from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.planning.towers import Pictures

BATCH = BatchPlan(Layout(2), 1, 8, 16, 2, num_generations=2)
TOKENS = [10, 10, 0, 0, 30, 30, 40, 40]  # of the images of each sample's prompt
# Completions of the third prompt are on both ranks.
PLAN = StepPlan([[[0, 1, 4], [2, 3]], [[5, 6], [7]]])


def test_an_image_counts_once_for_a_rank_and_as_often_as_it_is_shown_in_a_micro_batch() -> None:
    assert pictures_of(PLAN, BATCH, TOKENS) == Pictures(shown=70, distinct=70, of_rollout=2 * 70)
    alone = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]])
    assert pictures_of(alone, BATCH, TOKENS) == Pictures(shown=80, distinct=40, of_rollout=2 * 70)


def test_completions_that_share_a_prompt_show_its_image_once() -> None:
    plan = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]], share_prompts=True)
    assert pictures_of(plan, BATCH, TOKENS) == Pictures(shown=40, distinct=40, of_rollout=2 * 70)


def test_prompts_without_images_need_nothing() -> None:
    assert pictures_of(PLAN, BATCH, [0] * 8) == Pictures()
