"""Samples in arrays are those of the objects that are made from them: the same integers, counts and shared prompts."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import numpy as np
import pytest

from swift_megatron_grpo.grading.columns import Rewards
from swift_megatron_grpo.grading.graded import GradedRollouts, Outcomes
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.loop.samples import samples_of
from swift_megatron_grpo.packing.arrays import pick
from swift_megatron_grpo.packing.collate import count, num_completions
from swift_megatron_grpo.packing.completions import Facts, OutlinedRollouts
from swift_megatron_grpo.packing.outlines import Outline, OutlinedSamples, changed
from swift_megatron_grpo.packing.segments import shared_with_previous
from swift_megatron_grpo.types import Prompt, Sample


def draw(rng: random.Random, group_size: int) -> OutlinedSamples:
    """Return the samples of completions that stay on their ranks; some are dropped, too long or of a masked start."""
    facts, more = [], []
    for group in range(rng.randrange(1, 9)):
        asked, prompt = Prompt(f"row {group // 2 if rng.random() < 0.1 else group}", {}), rng.randrange(1, 30)
        for _ in range(group_size):
            tokens = rng.randrange(0, 40)
            first = rng.randrange(tokens) if tokens and rng.random() < 0.2 else 0
            facts.append((prompt + rng.randrange(2), tokens, tokens - first, first, rng.randrange(5)))
            more.append((rng.random() < 0.5, asked, None if rng.random() < 0.2 else 1.0, rng.random()))
    integers = dict(zip(("prompt", "completion", "sampled", "first", "home"), np.array(facts).T, strict=True))
    truncated, prompts, rewards, advantages = zip(*more, strict=True)
    rollouts = OutlinedRollouts(
        Facts(
            **integers, version=np.zeros(len(facts), np.int64), has_logprobs=np.ones(len(facts), np.bool_),
            truncated=np.array(truncated), asked=np.fromiter(prompts, np.object_), rare=np.full(len(facts), None),
        )
    )  # fmt: skip
    outcomes = Outcomes.of(rollouts, Scores.of([[1.0]] * len(facts), 1), Rewards.of(rewards))
    graded = GradedRollouts(rollouts, outcomes, np.array(advantages))
    samples = samples_of(graded, group_size, rng.random() < 0.5, image_reader=None)
    assert isinstance(samples, OutlinedSamples)
    return samples


@pytest.mark.parametrize("seed", range(300))
def test_integers_and_counts_are_those_of_the_objects(seed: int) -> None:
    rng = random.Random(seed)
    samples = draw(rng, rng.randrange(1, 5))
    objects = list(samples)
    for ours, theirs in zip(astuple(samples.outline), astuple(Outline.of(objects)), strict=True):
        assert np.array_equal(ours, theirs)
    assert count(samples) == count(objects) and num_completions(samples) == len(objects)
    assert shared_with_previous(samples).tolist() == shared_with_previous(objects).tolist()
    begin, end = sorted(rng.randrange(len(objects) + 1) for _ in range(2))
    chosen = np.array(rng.sample(range(len(objects)), rng.randrange(1, len(objects) + 1)))
    for part, of_objects in ((samples[begin:end], objects[begin:end]), (pick(samples, chosen), pick(objects, chosen))):
        assert all(ours is theirs for ours, theirs in zip(part, of_objects, strict=True))
        assert shared_with_previous(part).tolist() == shared_with_previous(of_objects).tolist()


def test_a_change_applies_to_what_is_read_and_to_nothing_else() -> None:
    samples = draw(random.Random(0), 4)
    changes: list[Sample] = []

    def change(sample: Sample) -> Sample:
        changes.append(sample)
        return replace(sample, advantage=9.0)

    new = changed(samples, change)
    assert new[2].advantage == 9.0 and new[2] is new[2] and samples[2].advantage != 9.0
    assert changes == [samples[2]] and count(new) == count(samples)


def test_values_of_a_batch_are_those_of_the_rollout() -> None:
    samples = draw(random.Random(1), 4)
    samples[2:4][1].old_logprobs = [-1.0]
    assert samples[3].old_logprobs == [-1.0] and samples[-1] is samples[len(samples) - 1]
    with pytest.raises(IndexError):
        samples[len(samples)]
