"""Rollouts, from prompts to graded completions."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.resampling import resample
from swift_megatron_grpo.grading.results import total_rewards
from swift_megatron_grpo.grading.rewards import call_reward_functions
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.loop.finished import Finished, Scored
from swift_megatron_grpo.loop.rollout_queue import RolloutQueue
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.spare_groups import SpareGroups
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.packing.arrays import pick
from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.settings.config import EvaluationConfig, GRPOConfig
from swift_megatron_grpo.types import DraftCounts, Graded, Prompt, Rollout

logger = logging.getLogger(__name__)


class Rollouts:
    """The rollouts of a run, in order. Every rank calls every method."""

    def __init__(self, config: GRPOConfig, stages: Stages, trainer_state: Any, ahead: RunAhead) -> None:
        self._config = config
        self._stages = stages
        self._ahead = ahead
        grading, per_rollout = config.grading, config.batch.rollout_prompts
        self._spares = SpareGroups(grading.spare_groups, per_rollout, grading.max_resample_times * per_rollout)
        self._queue = RolloutQueue(config, stages, ahead, self._spares)
        self._trainer_state = trainer_state  # reward functions may read it
        self.last = ahead.first_rollout - 1  # the number of the rollout taken last

    def skip(self) -> None:
        """Leave out the next rollout, which the checkpoint of a resumed run contains."""
        self.last += 1
        self._queue.first += 1

    def take(self, step: StepContext) -> GradedRollouts:
        """Return the next rollout with its total rewards."""
        self.last += 1
        rollout = self.last
        prompts = self._queue.prompts(rollout)
        if self._config.grading.max_resample_times > 0:
            graded, spare = self._draw(rollout, 0, prompts, step)
            graded = self._replace_uniform_groups(rollout, graded, spare, step)
            self._queue.start_ahead(rollout, step)  # only now: the draws come first
        else:
            graded, _ = self._draw(rollout, 0, prompts, step, ahead_of=rollout)
        step.metrics.update(self._take_draft_counts())
        if self._ahead.max_staleness:
            step.metrics.update(self._ahead.metrics(rollout, graded.rollouts))
        return graded

    def evaluate(self, prompts: Sequence[Prompt], evaluation: EvaluationConfig, step: StepContext) -> GradedRollouts:
        """Generate with the current weights and grade. Rollouts that have started are finished first, and kept."""
        started = self._queue.start_evaluation(prompts, evaluation, step)
        groups = self._queue.collect(started, step)
        scored = Scored.joined([self._grade(finished, started.group_size, step) for finished in groups])
        self._draft_from(scored.rollouts)
        self._take_draft_counts()  # the log has those of rollouts
        return self._with_totals(scored.between(0, started.size))

    def _draw(
        self,
        rollout: int,
        draw: int,
        prompts: Sequence[Prompt],
        step: StepContext,
        ahead_of: int | None = None,
        ready: Scored | None = None,
    ) -> tuple[GradedRollouts, Scored]:
        """Generate, grade and dump, or read a dump. Later rollouts start ahead of rollout `ahead_of` then.

        `ready`: completions of this draw that are graded already. Return its completions, and those of the spare groups
        that were generated with it.
        """
        if self._stages.replay is not None:
            return self._replayed(rollout, draw, prompts, step), self._queue.nothing_scored()
        dump = self._stages.dump
        started = self._queue.take(rollout, draw, prompts, step, ready or self._queue.nothing_scored())
        size = len(prompts) * started.group_size
        parts = [started.recorded]
        for finished in self._queue.collect(started, step, ahead_of):
            parts.append(self._grade(finished, started.group_size, step))
            if dump is not None and sum(map(len, parts)) < started.size:
                drawn = parts[-1].between(0, size).rows()
                dump.append(rollout, draw, [Graded(completion, rewards, None, 0.0) for completion, rewards in drawn])
        scored = Scored.joined(parts)
        self._draft_from(scored.rollouts[len(ready or ()) :])  # spare ones were remembered with the first draw
        result = self._with_totals(scored.between(0, size))
        if dump is not None:
            with step.timer("dump"):
                self._stages.coordinator.all_gather_or_raise(
                    lambda: dump.write(rollout, draw, result), "--rollout_dump"
                )
        return result, scored.between(size, started.size)

    def _draft_from(self, rollouts: Sequence[Rollout]) -> None:
        """Let every engine of these ranks draft from completions from now on, whichever has generated them."""
        if self._stages.drafts is not None:
            self._stages.drafts.remember(
                (sequence.prompt_ids, sequence.completion_ids)
                for completion in rollouts
                for sequence in completion.sequences
            )

    def _take_draft_counts(self) -> dict[str, float]:
        """Return metrics of the drafts since the last call, of all engines; none without drafts."""
        engine = self._stages.generation
        if engine is None or not self._config.engine.drafts:
            return {}
        total = sum(self._stages.coordinator.all_gather(engine.take_draft_counts()), start=DraftCounts())
        return {
            "drafts/verified": float(total.drafted),
            "drafts/accepted": float(total.accepted),
            "drafts/steps_saved": total.accepted / total.tokens if total.tokens else 0.0,
        }

    def _replayed(self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext) -> GradedRollouts:
        assert self._stages.replay is not None
        grading = self._config.grading
        with step.timer("replay"):
            rollouts, rewards = self._stages.replay.take(rollout, draw, prompts, grading.num_generations)
            self._queue.check_experts(rollouts)
            return total_rewards(rollouts, Scores.of(rewards, len(grading.reward_names)), grading)

    def _grade(self, finished: Finished, group_size: int, step: StepContext) -> Scored:
        """Return whole groups of completions with their scores. Every rank calls the reward functions for some."""
        coordinator, bodies = self._stages.coordinator, self._stages.bodies
        graders = finished.graders(group_size, coordinator.world_size)
        if bodies is not None:
            bodies.move_to(finished.rollouts, graders)
        own = pick(finished.rollouts, (graders == coordinator.rank).nonzero()[0])
        local = [rollout if bodies is None else bodies.whole(rollout) for rollout in own]
        with step.timer("grading"):
            gathered = coordinator.all_gather_or_raise(lambda: self._scores_of(local).to_bytes(), "grading")
        return Scored(finished.indices, finished.rollouts, Scores.from_bytes(gathered, len(finished)))

    def _scores_of(self, rollouts: Sequence[Rollout]) -> Scores:
        """Call the reward functions on completions of which this rank has the tokens."""
        rewards, drops = self._stages.rewards, self._config.grading.bad_reward == "drop"
        rows = call_reward_functions(rollouts, rewards, self._trainer_state, self._reward_limit, drops)
        return Scores.of(rows, len(rewards.names))

    @contextmanager
    def _reward_limit(self, what: str) -> Iterator[float | None]:
        stop = self._stages.stop
        seconds = self._config.deadlines.reward_timeout
        try:
            with self._stages.watchdog.limit(what, seconds, "--reward_timeout", stop.out_of_time):
                yield seconds
        except DeadlineExceeded:
            if stop.out_of_time():
                raise stop.give_up(what) from None
            raise

    def _with_totals(self, scored: Scored) -> GradedRollouts:
        assert np.array_equal(scored.indices, np.arange(len(scored))), "every request has one completion"
        return total_rewards(scored.rollouts, scored.scores, self._config.grading)

    def _replace_uniform_groups(
        self, rollout: int, graded: GradedRollouts, spare: Scored, step: StepContext
    ) -> GradedRollouts:
        """Replace groups of equal rewards by groups of further prompts, first by the `spare` ones."""
        grading = self._config.grading
        group_size, per_rollout = grading.num_generations, self._config.batch.rollout_prompts
        draws = count(1)  # the first one is in `graded`
        drawn = 0  # groups

        def draw(groups: int) -> GradedRollouts:
            nonlocal drawn
            prompts = self._queue.drawn_prompts(rollout, drawn, groups)
            ready = spare.between(drawn * group_size, (drawn + groups) * group_size)
            drawn += groups
            return self._draw(rollout, next(draws), prompts, step, ready=ready)[0]

        weights = grading.reward_weights if grading.scale_rewards == "gdpo" else ()
        resampled = resample(graded, group_size, grading.max_resample_times, draw, weights)
        if resampled.uniform:
            logger.warning(
                f"{resampled.uniform} of {per_rollout} groups have equal rewards after --max_resample_times "
                f"{grading.max_resample_times} rounds; they stay in the batch, with advantages of 0"
            )
        self._spares.remember(resampled.generated, per_rollout - resampled.uniform)
        step.metrics.update(resampled.metrics())
        spare_groups = len(spare) // group_size
        step.metrics["dynamic_sample/spare_groups"] = float(spare_groups)
        step.metrics["dynamic_sample/dropped_groups"] = float(max(spare_groups - drawn, 0))
        return resampled.graded
