"""Rollouts, from prompts to graded completions."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from swift_megatron_grpo.generation.interface import Share
from swift_megatron_grpo.generation.vllm.drafts import DraftCounts
from swift_megatron_grpo.grading.results import resample, total_rewards
from swift_megatron_grpo.grading.rewards import call_reward_functions
from swift_megatron_grpo.loop.rollout_queue import RolloutQueue
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.spare_groups import SpareGroups
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.output.recording.reading import Recorded
from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.settings.config import EvaluationConfig, GRPOConfig
from swift_megatron_grpo.types import Graded, Prompt, Rollout

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

    def take(self, step: StepContext) -> list[Graded]:
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
            step.metrics.update(self._ahead.metrics(rollout, [completion.rollout for completion in graded]))
        return graded

    def evaluate(self, prompts: Sequence[Prompt], evaluation: EvaluationConfig, step: StepContext) -> list[Graded]:
        """Generate with the current weights and grade. Rollouts that have started are finished first, and kept."""
        started = self._queue.start_evaluation(prompts, evaluation, step)
        graded: Recorded = {}
        for groups in self._queue.collect(started, step):
            graded |= self._grade(groups, started.group_size, step)
        self._draft_from(graded)
        self._take_draft_counts()  # the log has those of rollouts
        return self._with_totals(graded)

    def _draw(
        self,
        rollout: int,
        draw: int,
        prompts: Sequence[Prompt],
        step: StepContext,
        ahead_of: int | None = None,
        ready: Recorded | None = None,
    ) -> tuple[list[Graded], Recorded]:
        """Generate, grade and dump, or read a dump. Later rollouts start ahead of rollout `ahead_of` then.

        `ready`: completions of this draw that are graded already. Return its completions, and those of the spare groups
        that were generated with it.
        """
        if self._stages.replay is not None:
            return self._replayed(rollout, draw, prompts, step), {}
        dump = self._stages.dump
        started = self._queue.take(rollout, draw, prompts, step, ready or {})
        size = len(prompts) * started.group_size
        graded = dict(started.recorded)
        for groups in self._queue.collect(started, step, ahead_of):
            new = self._grade(groups, started.group_size, step)
            graded |= new
            if dump is not None and len(graded) < started.size:
                drawn = (new[index] for index in sorted(new) if index < size)
                dump.append(rollout, draw, [Graded(completion, rewards, None, 0.0) for completion, rewards in drawn])
        self._draft_from(graded)
        result = self._with_totals({index: graded[index] for index in range(size)})
        if dump is not None:
            with step.timer("dump"):
                self._stages.coordinator.all_gather_or_raise(
                    lambda: dump.write(rollout, draw, result), "--rollout_dump"
                )
        return result, {index - size: graded[index] for index in range(size, started.size)}

    def _draft_from(self, graded: Recorded) -> None:
        """Let every engine draft from these completions from now on, whichever has generated them."""
        if self._stages.drafts is not None:
            self._stages.drafts.remember(
                (sequence.prompt_ids, sequence.completion_ids)
                for completion, _ in graded.values()
                for sequence in completion.sequences
            )

    def _take_draft_counts(self) -> dict[str, float]:
        """Return metrics of the drafts since the last call, of all engines; none without drafts."""
        drafts, engine = self._stages.drafts, self._stages.generation
        if drafts is None:
            return {}
        assert engine is not None
        counts = drafts.take_counts()  # of an engine, so every rank of it has the same
        gathered = self._stages.coordinator.all_gather(counts if engine.share.reports else DraftCounts())
        total = sum(gathered, start=DraftCounts())
        return {
            "drafts/verified": float(total.drafted),
            "drafts/accepted": float(total.accepted),
            "drafts/steps_saved": total.accepted / total.tokens if total.tokens else 0.0,
        }

    def _replayed(self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext) -> list[Graded]:
        assert self._stages.replay is not None
        grading = self._config.grading
        with step.timer("replay"):
            rollouts, rewards = self._stages.replay.take(rollout, draw, prompts, grading.num_generations)
            self._queue.check_experts(rollouts)
            return total_rewards(rollouts, rewards, grading)

    def _grade(self, groups: Mapping[int, Rollout], group_size: int, step: StepContext) -> Recorded:
        """Return whole groups of completions with their rewards. Every rank calls the reward functions for some."""
        coordinator = self._stages.coordinator
        rollouts = list(groups.values())
        whole = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        ranks = range(coordinator.world_size)
        shares = [Share(rank, coordinator.world_size, reports=True).pick(whole) for rank in ranks]
        bodies = self._stages.bodies
        if bodies is not None:
            bodies.move((rollout.body, rank) for rank in ranks for group in shares[rank] for rollout in group)
        local = [
            rollout if bodies is None else bodies.whole(rollout)
            for group in shares[coordinator.rank]
            for rollout in group
        ]
        drops = self._config.grading.bad_reward == "drop"
        with step.timer("grading"):
            gathered = coordinator.all_gather_or_raise(
                lambda: call_reward_functions(
                    local, self._stages.rewards, self._trainer_state, self._reward_limit, drops
                ),
                "grading",
            )
        rewards = [row for rows in gathered for row in rows]
        return {index: (groups[index], row) for index, row in zip(groups, rewards, strict=True)}

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

    def _with_totals(self, graded: Recorded) -> list[Graded]:
        in_order = [graded[index] for index in range(len(graded))]
        return total_rewards(
            [rollout for rollout, _ in in_order], [rewards for _, rewards in in_order], self._config.grading
        )

    def _replace_uniform_groups(
        self, rollout: int, graded: list[Graded], spare: Recorded, step: StepContext
    ) -> list[Graded]:
        """Replace groups of equal rewards by groups of further prompts, first by the `spare` ones."""
        grading = self._config.grading
        group_size, per_rollout = grading.num_generations, self._config.batch.rollout_prompts
        draws = count(1)  # the first one is in `graded`
        drawn = 0  # groups

        def draw(groups: int) -> list[Graded]:
            nonlocal drawn
            prompts = self._queue.drawn_prompts(rollout, drawn, groups)
            places = range(drawn * group_size, (drawn + groups) * group_size)
            ready = {index - places.start: spare[index] for index in places if index in spare}
            drawn += groups
            return self._draw(rollout, next(draws), prompts, step, ready=ready)[0]

        resampled = resample(graded, group_size, grading.max_resample_times, draw)
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
