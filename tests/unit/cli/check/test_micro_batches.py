"""The largest micro batch of a planned step, and its images; those too that a rank keeps for a rollout."""

from __future__ import annotations

from dataclasses import replace

from swift_megatron_grpo.cli.check.micro_batches import fullest, image_tokens_of
from swift_megatron_grpo.cli.estimate.activations import ImageTokens, Tokens
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.settings.batches import BatchSizes, MicroBatches
from swift_megatron_grpo.settings.layout import Layout
from tests.unit.settings.flags import of

BATCH = BatchSizes(Layout(2), 1, 8, 16, 2, num_generations=2)
TOKENS = [10, 10, 0, 0, 30, 30, 40, 40]  # of the images of each sample's prompt
# Completions of the third prompt are on both ranks.
PLAN = StepPlan([[[0, 1, 4], [2, 3]], [[5, 6], [7]]])


def test_an_image_counts_once_per_rank_and_per_use_in_a_micro_batch() -> None:
    assert image_tokens_of(PLAN, BATCH, TOKENS) == ImageTokens(shown=70, distinct=70, of_rollout=2 * 70)
    alone = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]])
    assert image_tokens_of(alone, BATCH, TOKENS) == ImageTokens(shown=80, distinct=40, of_rollout=2 * 70)


def test_completions_that_share_a_prompt_show_its_image_once() -> None:
    plan = replace(PLAN, assignment=[[[0, 1, 4], [2, 3]], [[5], [6, 7]]], share_prompts=True)
    assert image_tokens_of(plan, BATCH, TOKENS) == ImageTokens(shown=40, distinct=40, of_rollout=2 * 70)


def test_prompts_without_images_need_nothing() -> None:
    assert image_tokens_of(PLAN, BATCH, [0] * 8) == ImageTokens()


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
