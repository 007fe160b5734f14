"""Graded completions as training samples, with the images of their prompts, and the tokens that are trained."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import is_not

import numpy as np

from swift_megatron_grpo.data.image_reader import ImageReader, Medium
from swift_megatron_grpo.data.teacher_prompts import TeacherPrompts
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.packing.bins import Bools
from swift_megatron_grpo.packing.completions import Facts, OutlinedRollouts
from swift_megatron_grpo.packing.outlines import Outline, OutlinedSamples, Prompts, changed
from swift_megatron_grpo.types import ExpertRows, Graded, PlacedImage, Prompt, Rollout, Sample, TokenSequence

NO_TOKEN = -1  # a token that the policy sampled stands for no image


def samples_of(
    graded: Sequence[Graded],
    group_size: int,
    overlong_filter: bool,
    image_reader: ImageReader | None,
    replays_engine: bool = False,
    teacher_prompts: TeacherPrompts | None = None,
    tag_column: str | None = None,
) -> Sequence[Sample]:
    """Return a sample for each sequence of the completions; those of a completion are in the order of their tokens.

    `replays_engine`: its routers choose the experts that the engine chose. `tag_column`: its value picks the teacher of
    a row.
    """
    if isinstance(graded, GradedRollouts) and isinstance(graded.rollouts, OutlinedRollouts):
        return _outlined(graded, graded.rollouts.facts, group_size, overlong_filter)
    read: dict[str, list[Medium]] = {}  # by prompt: its images are read once

    def place(rollout: Rollout, sequence: TokenSequence) -> tuple[PlacedImage, ...]:
        if image_reader is None:
            return ()
        prompt = rollout.prompt
        completed = zip(sequence.completion_ids, sequence.sampled_mask, strict=True)
        inserted = [NO_TOKEN if is_sampled else token for token, is_sampled in completed]
        changed = "images" in rollout.infos  # by a scheduler or an environment
        if changed:
            shown = image_reader.images({**prompt.row, "images": rollout.infos["images"]})
        else:
            if prompt.prompt_id not in read:
                read[prompt.prompt_id] = image_reader.images(prompt.row)
            shown = read[prompt.prompt_id]
        may_end_early = changed or bool(rollout.earlier)
        return image_reader.place(prompt.prompt_id, shown, sequence.prompt_ids + inserted, may_end_early)

    sequences = [
        (index, completion, sequence, rows)
        for index, completion in enumerate(graded)
        for sequence, rows in _with_experts(completion.rollout)
    ]
    rollouts = [completion.rollout for completion in graded]
    of_teacher = [None] * len(sequences) if teacher_prompts is None else teacher_prompts.tokens(rollouts)
    samples = []
    for (index, completion, sequence, rows), teacher_tokens in zip(sequences, of_teacher, strict=True):
        rollout, sampled = completion.rollout, sequence.sampled_mask
        valid = completion.reward is not None
        too_long = valid and overlong_filter and rollout.truncated
        trained = valid and not too_long
        if rollout.body is not None:
            samples.append(_without_tokens(completion, index, index // group_size, trained, too_long))
            continue
        samples.append(
            Sample(
                tokens=sequence.tokens,
                completion_mask=[False] * len(sequence.prompt_ids) + [trained and token for token in sampled],
                advantage=completion.advantage,
                group=index // group_size,
                completion=index,
                truncated=rollout.truncated,
                teacher_tokens=teacher_tokens,
                tag=None if tag_column is None else str(rollout.prompt.row[tag_column]),
                rollout_logprobs=[] if sequence.logprobs is not None and not trained else sequence.logprobs,
                left_out=sum(sampled) if too_long else 0,
                context=len(sequence.prompt_ids) + (sampled.index(True) if True in sampled else len(sampled)),
                images=place(rollout, sequence),
                routed_experts=rows if replays_engine else None,
            )
        )
    if any(rollout.earlier for rollout in rollouts):  # neighbours share what they begin with: packing/segments.py
        samples.sort(key=lambda sample: (sample.completion, sample.tokens))
    return samples


def _with_experts(rollout: Rollout) -> list[tuple[TokenSequence, ExpertRows | None]]:
    """Return the sequences of a completion, and the experts that the engine chose for the tokens of the last one."""
    *earlier, last = rollout.sequences
    return [*((sequence, None) for sequence in earlier), (last, rollout.routed_experts)]


def engine_experts(rollouts: Sequence[Rollout]) -> list[ExpertRows | None]:
    """Return the experts that the engine chose for each sample of these completions, in the order of `samples_of`."""
    chosen: list[ExpertRows | None] = []
    for rollout in rollouts:
        if rollout.earlier:
            ordered = sorted(_with_experts(rollout), key=lambda one: one[0].tokens)
            chosen += [rows for _, rows in ordered]
        else:
            chosen.append(rollout.routed_experts)
    return chosen


def _outlined(graded: GradedRollouts, facts: Facts, group_size: int, overlong_filter: bool) -> OutlinedSamples:
    """Return the samples of completions that all stay on their ranks."""
    lengths = facts.prompt + facts.completion
    valid = graded.outcomes.rewards.valid
    too_long = valid & facts.truncated if overlong_filter else np.zeros_like(valid)
    trained = valid & ~too_long
    numbers = np.arange(len(graded))
    groups = numbers // group_size
    outline = Outline(
        lengths=lengths,
        trained=np.where(trained, facts.sampled, 0),
        groups=groups,
        completions=numbers,
        left_out=np.where(too_long, facts.sampled, 0),
        homes=facts.home,
        answers=np.zeros(len(graded), np.bool_),
    )
    differs = _follow_another_prompt(facts.asked.tolist())
    number = np.concatenate([[0], np.cumsum(differs | (np.diff(groups) > 0))])

    def make(i: int) -> Sample:
        return _without_tokens(graded[i], i, i // group_size, bool(trained[i]), bool(too_long[i]))

    return OutlinedSamples(outline, Prompts(number, np.minimum(facts.prompt, lengths - 1)), make)


def _follow_another_prompt(asked: Sequence[Prompt]) -> Bools:
    """Return for each prompt but the first if it is another one than that before it."""
    is_another_object = np.fromiter(map(is_not, asked, islice(asked, 1, None)), np.bool_)
    for place in is_another_object.nonzero()[0].tolist():
        is_another_object[place] = asked[place].prompt_id != asked[place + 1].prompt_id
    return is_another_object


def _without_tokens(completion: Graded, index: int, group: int, trained: bool, too_long: bool) -> Sample:
    """Return the sample of a completion whose tokens loop/bodies.py has, on this rank or on another one."""
    rollout = completion.rollout
    body = rollout.body
    assert body is not None
    return Sample(
        tokens=[],
        completion_mask=[],
        advantage=completion.advantage,
        group=group,
        completion=index,
        truncated=rollout.truncated,
        rollout_logprobs=rollout.logprobs,
        left_out=body.sampled if too_long else 0,
        body=body,
        context=body.prompt + body.first,
        is_left_out=not trained,
    )


def without_routing(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return samples whose experts the routers choose, as a reference model's do."""
    return changed(samples, lambda sample: replace(sample, routed_experts=None))


def as_teacher_reads(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples behind the prompts of the teacher, whose routers choose the experts."""
    return [_behind_teacher_prompt(sample) for sample in without_routing(samples)]


def _behind_teacher_prompt(sample: Sample) -> Sample:
    tokens = sample.teacher_tokens
    if tokens is None:
        return sample
    longer = len(tokens) - len(sample.tokens)  # below 0: the teacher's prompt is the shorter one
    mask = [False] * longer + sample.completion_mask[max(-longer, 0) :]
    return replace(sample, tokens=tokens, completion_mask=mask, context=None)


def entropy_threshold(entropies: Iterable[np.ndarray], quantile: float) -> float:
    """Return the threshold above which the share `quantile` of all tokens lies, or 0 without tokens.

    Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939, interpolated as in torch and numpy. There is one threshold
    for the whole step, so that the selection does not depend on how completions were packed or distributed. ms-swift
    computes one per micro batch and rank.
    """
    values = [array for array in entropies if array.size]
    return float(np.quantile(np.concatenate(values), 1 - quantile)) if values else 0.0


def select_tokens(sample: Sample, entropies: np.ndarray, threshold: float) -> None:
    sample.selected = (entropies >= threshold).tolist()


def squared_log_ratios(sample: Sample, policy: Sequence[float]) -> np.ndarray:
    """Return (log pi - log pi_engine)^2, [c]. `policy`: the log-probs of the tokens by the trainer."""
    if sample.rollout_logprobs is None:
        raise RuntimeError(
            "completions came without the engine's log-probs, which --m2_threshold compares with the policy's; leave "
            "it out or, with --rollout_replay, use a folder with logprobs"
        )
    return np.square(np.asarray(policy, np.float64) - np.asarray(sample.rollout_logprobs, np.float64))


def mask_tokens(sample: Sample, squares: np.ndarray, limit: float) -> None:
    """Exclude tokens whose squared log-ratio reaches the limit, as well as those that are not selected already."""
    selected = np.ones(len(squares), bool) if sample.selected is None else np.asarray(sample.selected, bool)
    sample.selected = (selected & (squares < limit)).tolist()
