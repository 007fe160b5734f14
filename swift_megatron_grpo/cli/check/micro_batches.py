"""Plan the micro batches of a step before the run, and measure the largest one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

import numpy as np

from swift_megatron_grpo.cli.check.model import Model
from swift_megatron_grpo.cli.estimate.activations import MediaTokens, Tokens
from swift_megatron_grpo.packing.bundles import SampleWork, gain_of, plan_within, shared_if_worth_it
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, room_of
from swift_megatron_grpo.settings.batches import BatchSizes, MicroBatches
from swift_megatron_grpo.settings.layout import Layout

Sample = tuple[int, int]  # tokens, and those of its completion; of a given answer, those that are trained


def micro_batches(
    batch: BatchSizes, packing: MicroBatches, model: Model, samples: Sequence[Sample]
) -> tuple[StepPlan, Tokens]:
    """Plan a step as training/planner.py does, on numbers alone. Returns the plan and its largest micro batch."""
    layout = batch.layout
    # Whether completions can share a prompt: training/layers/shared_prompts.py decides it in a run.
    can_share = layout.context_parallel_size == 1 and not model.repeats_prompts
    share_from = packing.share_prompts_from if can_share else None
    work = _work(batch, model, samples)
    budget, multiple = packing.max_tokens_per_micro_batch, 1
    if budget is None:
        plan = plan_by_count(len(samples), layout.data_parallel, batch.micro_batch_size)
        if share_from is not None:
            plan = shared_if_worth_it(plan, work, share_from)
    else:
        if layout.virtual_pipeline_model_parallel_size > 1:
            multiple = layout.microbatch_group_size_per_vp_stage or layout.pipeline_model_parallel_size
        plan = plan_within(budget, work, layout.data_parallel, _alignment(layout), multiple, share_from)
    parts = [micro_batch for rank in plan.assignment for micro_batch in rank]
    sizes = [_tokens(part, plan, samples, batch.num_generations) for part in parts]
    return plan, max(sizes, key=lambda tokens: tokens.packed + tokens.keys)


def fullest(
    plan: StepPlan, largest: Tokens, batch: BatchSizes, packing: MicroBatches, samples: Sequence[Sample]
) -> int:
    """Return the packed tokens of the largest micro batch that shorter completions can make.

    `plan` and `largest` are those of completions of full length. They may leave much of the token budget empty: two of
    2,176 tokens fill 4,352 of 6,144, where shorter ones fill 5,625 (benchmarks/h100/moe-30b-a3b-lora-ep2-h100.json).
    """
    if packing.max_tokens_per_micro_batch is None:
        return largest.packed
    room, size = room_of(packing.max_tokens_per_micro_batch, _alignment(batch.layout)), batch.num_generations
    of_rank = max(sum(_tokens(part, plan, samples, size).packed for part in rank) for rank in plan.assignment)
    return max(largest.packed, min(room, of_rank))


@dataclass(frozen=True, slots=True)
class AnswerBatches:
    """The micro batches of given answers (--chord_sft_dataset), which a step has next to those of completions."""

    largest: Tokens  # whichever answers it takes
    number: int  # of a step, on one data-parallel rank
    longest: int  # tokens of an answer
    of_step: list[Sample]

    @classmethod
    def plan(
        cls, answers: Sequence[Sample], of_step: int, together: int, layout: Layout, budget: int | None
    ) -> AnswerBatches:
        """Plan `of_step` answers, `together` in a micro batch, or as many as a token budget has room for."""
        of_rank = math.ceil(of_step / layout.data_parallel)
        lengths = sorted((tokens for tokens, _ in answers), reverse=True)
        if budget is None:
            most = sorted((trained for _, trained in answers), reverse=True)
            packed, trained = (sum(islice(cycle(values), together)) for values in (lengths, most))
            number = math.ceil(of_rank / together)
        else:
            total = sum(islice(cycle(lengths), of_rank))
            packed = max(lengths[0], min(room_of(budget, _alignment(layout)), total))
            trained = math.ceil(packed * max(trained / tokens for tokens, trained in answers))
            number = math.ceil(total / packed)
        return cls(Tokens(packed, packed, trained), number, lengths[0], list(islice(cycle(answers), of_step)))

    def joined(self, tokens: Tokens) -> Tokens:
        """Return what a micro batch has at most, of answers or of completions, of which the largest has `tokens`."""
        own = self.largest
        return Tokens(max(tokens.packed, own.packed), max(tokens.keys, own.keys), max(tokens.trained, own.trained))


def media_tokens_of(plan: StepPlan, batch: BatchSizes, tokens: Sequence[int]) -> MediaTokens:
    """Return the images, or recordings, of a step. `tokens`: those that stand for them in each sample's prompt."""
    size = batch.num_generations

    def distinct(indices: Iterable[int]) -> int:
        return sum(tokens[place * size] for place in {index // size for index in indices})

    parts = [part for rank in plan.assignment for part in rank]
    return MediaTokens(
        shown=max(distinct(part) if plan.share_prompts else sum(tokens[index] for index in part) for part in parts),
        distinct=max(map(distinct, parts)),
        of_rollout=max(distinct(chain(*rank)) for rank in plan.assignment) * batch.steps_per_generation,
    )


def saved_by_sharing(plan: StepPlan, batch: BatchSizes, model: Model, samples: Sequence[Sample]) -> float:
    """Return the share of a step's work that shared prompts save."""
    return gain_of(plan, _work(batch, model, samples)).gain if plan.share_prompts else 0.0


def _work(batch: BatchSizes, model: Model, samples: Sequence[Sample]) -> SampleWork:
    tokens, completions = np.array(samples).T
    shared = np.where(np.arange(len(samples)) % batch.num_generations, tokens - completions, 0)
    return SampleWork(tokens, completions, None, model.flops, shared)


def _alignment(layout: Layout) -> Alignment:
    sizes = layout.tensor_model_parallel_size, layout.context_parallel_size
    return Alignment.of_layout(*sizes, layout.sequence_parallel)


def _tokens(micro_batch: Sequence[int], plan: StepPlan, samples: Sequence[Sample], group_size: int) -> Tokens:
    repeated, trained = sum(samples[i][0] for i in micro_batch), sum(samples[i][1] for i in micro_batch)
    if not plan.share_prompts:
        return Tokens(repeated, repeated, trained)
    prompts = {i // group_size: samples[i][0] - samples[i][1] for i in micro_batch}
    return Tokens(trained + sum(prompts.values()), repeated, trained)
