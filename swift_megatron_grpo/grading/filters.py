"""Dynamic sampling, DAPO, https://arxiv.org/abs/2503.14476: groups of equal rewards teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift_megatron_grpo.grading.statistics import standard_deviation, valid
from swift_megatron_grpo.types import Graded

Draw = Callable[[int], Sequence[Graded]]  # so many groups of other prompts, generated and graded


@dataclass(frozen=True, slots=True)
class Resampled:
    graded: list[Graded]  # as many as before
    rounds: int  # how often more was generated
    generated: int  # groups, with the first ones
    uniform: int  # groups of equal rewards that are left, because the rounds ran out

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sample/rounds": float(self.rounds),
            "dynamic_sample/generated_groups": float(self.generated),
            "dynamic_sample/uniform_groups": float(self.uniform),
        }


def has_spread(group: Sequence[Graded]) -> bool:
    return standard_deviation(valid([each.reward for each in group])) > 0


def resample(first: Sequence[Graded], num_generations: int, max_times: int, draw: Draw) -> Resampled:
    """Groups of equal rewards are replaced by groups of other prompts, at most `max_times`.

    Every group with a spread is kept, and only as many are generated as are missing. When the rounds run out the rest
    of the batch is made up of the first groups without a spread: the batch keeps its size, and their advantages are 0.
    """
    wanted = len(first) // num_generations
    informative: list[Sequence[Graded]] = []
    uniform: list[Sequence[Graded]] = []
    rounds, new = 0, first
    while True:
        for start in range(0, len(new), num_generations):
            group = new[start : start + num_generations]
            (informative if has_spread(group) else uniform).append(group)
        missing = wanted - len(informative)
        if missing == 0 or rounds == max_times:
            break
        new = draw(missing)
        rounds += 1
    groups = informative + uniform[:missing]
    return Resampled(
        graded=[each for group in groups for each in group],
        rounds=rounds,
        generated=len(informative) + len(uniform),
        uniform=missing,
    )
