"""Rewards of whole groups of completions: every rank calls the reward functions for some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swift_megatron_grpo.generation.interface import Share
from swift_megatron_grpo.grading.rewards import call_reward_functions
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.output.recording.earlier import Recorded
from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.types import Rollout


class Grader:
    """Calls the reward functions. Every rank calls `grade`, and gets the rewards of all ranks."""

    def __init__(self, config: GRPOConfig, stages: Stages, trainer_state: Any) -> None:
        self._limit_seconds = config.deadlines.reward_timeout
        self._drops_failing = config.grading.bad_reward == "drop"
        self._stages = stages
        self._trainer_state = trainer_state  # reward functions may read it

    def grade(self, groups: Mapping[int, Rollout], group_size: int, step: StepContext) -> Recorded:
        """Return whole groups of completions with their rewards, by the same index."""
        coordinator = self._stages.coordinator
        rollouts = list(groups.values())
        whole = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        share = Share(coordinator.rank, coordinator.world_size, reports=True)
        local = [rollout for group in share.pick(whole) for rollout in group]
        with step.timer("grading"):
            gathered = coordinator.all_gather_or_raise(
                lambda: call_reward_functions(
                    local, self._stages.rewards, self._trainer_state, self._reward_limit, self._drops_failing
                ),
                "grading",
            )
        rewards = [row for rows in gathered for row in rows]
        return {index: (groups[index], row) for index, row in zip(groups, rewards, strict=True)}

    @contextmanager
    def _reward_limit(self, what: str) -> Iterator[float | None]:
        stop = self._stages.stop
        try:
            with self._stages.watchdog.limit(what, self._limit_seconds, "--reward_timeout", stop.out_of_time):
                yield self._limit_seconds
        except DeadlineExceeded:
            if stop.out_of_time():
                raise stop.give_up(what) from None
            raise
