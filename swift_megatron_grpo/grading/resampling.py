"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): groups of equal rewards give no gradient."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from swift_megatron_grpo.grading.columns import Rewards, means, standard_deviations
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.packing.bins import Bools

Draw = Callable[[int], GradedRollouts]  # n -> n groups of further prompts, generated and graded


class Resampled(NamedTuple):
    graded: GradedRollouts  # as many as before
    rounds: int  # rounds in which more groups were generated
    generated: int  # groups generated in total, including the first ones
    uniform: int  # groups of equal rewards that remain because the rounds ran out

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sample/rounds": float(self.rounds),
            "dynamic_sample/generated_groups": float(self.generated),
            "dynamic_sample/uniform_groups": float(self.uniform),
        }


def with_spread(graded: GradedRollouts, num_generations: int, weights: Sequence[float] = ()) -> Bools:
    """Return for each group if its rewards differ; with weights, those of any function that has one (GDPO).

    GDPO normalises every function separately: a group of equal sums has advantages if its parts differ.
    """
    rewards, scores = graded.outcomes.rewards, graded.outcomes.scores
    weighted = [function for function, weight in enumerate(weights) if weight]
    parts = [Rewards.where(scores.applies[:, i] & rewards.valid, scores.values[:, i]) for i in weighted]
    groups = [part.in_groups(num_generations) for part in parts or [rewards]]
    differs: Bools = np.any([standard_deviations(group, means(group)) > 0 for group in groups], axis=0)
    return differs


def resample(
    first: GradedRollouts, num_generations: int, max_times: int, draw: Draw, weights: Sequence[float] = ()
) -> Resampled:
    """Replace groups of equal rewards by groups of further prompts, in at most `max_times` rounds.

    Every group with a spread is kept, and only the missing number of groups is generated. If the rounds run out, the
    batch is filled with the first groups without a spread: the batch keeps its size, and their advantages are 0.
    """
    group_count = len(first) // num_generations
    informative: list[GradedRollouts] = []
    uniform: list[GradedRollouts] = []
    missing, rounds, generated = group_count, 0, 0
    new = first
    while True:
        keeps = with_spread(new, num_generations, weights)
        of_completions = np.repeat(keeps, num_generations)
        informative.append(new.pick(of_completions.nonzero()[0]))
        uniform.append(new.pick((~of_completions).nonzero()[0]))
        generated += len(keeps)
        missing -= int(keeps.sum())
        if missing == 0 or rounds == max_times:
            break
        new = draw(missing)
        rounds += 1
    filling = GradedRollouts.joined(uniform)[: missing * num_generations]
    return Resampled(GradedRollouts.joined([*informative, filling]), rounds, generated, uniform=missing)
