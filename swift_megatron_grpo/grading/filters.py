"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): groups of equal rewards give no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from swift_megatron_grpo.grading.advantages import standard_deviation, valid
from swift_megatron_grpo.types import Graded

Draw = Callable[[int], Sequence[Graded]]  # n -> n groups of further prompts, generated and graded


class Resampled(NamedTuple):
    graded: list[Graded]  # as many as before
    rounds: int  # rounds in which more groups were generated
    generated: int  # groups generated in total, including the first ones
    uniform: int  # groups of equal rewards that remain because the rounds ran out

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sample/rounds": float(self.rounds),
            "dynamic_sample/generated_groups": float(self.generated),
            "dynamic_sample/uniform_groups": float(self.uniform),
        }


def has_spread(group: Sequence[Graded]) -> bool:
    return standard_deviation(valid([graded.reward for graded in group])) > 0


def resample(first: Sequence[Graded], num_generations: int, max_times: int, draw: Draw) -> Resampled:
    """Replace groups of equal rewards by groups of further prompts, in at most `max_times` rounds.

    Every group with a spread is kept, and only the missing number of groups is generated. If the rounds run out, the
    batch is filled with the first groups without a spread: the batch keeps its size, and their advantages are 0.
    """
    group_count = len(first) // num_generations
    informative: list[Sequence[Graded]] = []
    uniform: list[Sequence[Graded]] = []
    rounds = 0
    new = first
    while True:
        for start in range(0, len(new), num_generations):
            group = new[start : start + num_generations]
            (informative if has_spread(group) else uniform).append(group)
        missing = group_count - len(informative)
        if missing == 0 or rounds == max_times:
            break
        new = draw(missing)
        rounds += 1
    groups = informative + uniform[:missing]
    return Resampled(
        graded=[graded for group in groups for graded in group],
        rounds=rounds,
        generated=len(informative) + len(uniform),
        uniform=missing,
    )
