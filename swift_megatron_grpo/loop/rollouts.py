"""From prompts to graded completions: those of the rollout that is trained next, and what is begun ahead of it.

prompts -> generation -> grading -> (other prompts for groups that teach nothing)

With --max_staleness 0 a rollout begins when it is wanted. Above it, later ones begin as soon as the engine has answered
all of this one, and are generated while this one is graded and trained; generation/queue.py has the rule.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from swift_megatron_grpo.config import GRPOConfig
from swift_megatron_grpo.generation.interface import Generation, Share, requests_for
from swift_megatron_grpo.grading import call_reward_functions, resample, total_rewards
from swift_megatron_grpo.loop.phase_timer import PhaseTimer
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.types import Graded, Prompt, Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer step that asks."""

    version: int  # of the trainer's weights
    timer: PhaseTimer
    metrics: dict[str, float] = field(default_factory=dict)  # for its log


@dataclass(slots=True)
class _Begun:
    """Completions on their way."""

    generation: Generation
    group: int  # completions of one prompt
    missing: int  # completions that have not been told yet
    versions: set[int]  # of weights that may answer
    kept: dict[int, Rollout] = field(default_factory=dict)  # told before they were wanted


def _nothing() -> None: ...


class Rollouts:
    """All ranks together."""

    def __init__(self, config: GRPOConfig, stages: Stages, trainer_state: Any, ahead: RunAhead) -> None:
        self._config, self._stages = config, stages
        self._trainer_state = trainer_state  # reward functions may read it
        self._ahead = ahead
        self._next = ahead.first_rollout  # the number of the rollout that is trained next
        self._begun: deque[_Begun] = deque()  # that one, if it is begun, and those after it
        self._engine_version = NO_WEIGHTS  # of the weights that were sent last

    def take(self, step: Step) -> list[Graded]:
        """The next rollout, with its total rewards."""
        number, resamples = self._next, self._config.grading.max_resample_times > 0
        self._next += 1
        begin_ahead = partial(self._begin_ahead, number, step)
        graded = self._draw(number, 0, self._prompts(number), step, _nothing if resamples else begin_ahead)
        if resamples:  # which asks the engine for more
            graded = self._replace_uniform_groups(number, graded, step)
            begin_ahead()
        if self._ahead.max_staleness:
            stale = [self._ahead.staleness(number, each.rollout.weights_version) for each in graded]
            step.metrics["rollout/staleness"] = sum(stale) / len(stale)
            step.metrics["rollout/staleness_max"] = max(stale)
        return graded

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int, step: Step) -> list[Graded]:
        """By the weights as they are: what was begun ahead is waited for, and kept."""
        for begun in self._begun:
            for groups in self._collect(begun, step):
                begun.kept |= groups
        return self._grade(self._begin(prompts, num_generations, step), step)

    # ---- the rollouts of the run, by their numbers

    def _prompts(self, rollout: int) -> list[Prompt]:
        """Its number alone says which, so what was begun ahead of a checkpoint is begun again when a run is resumed."""
        source, size = self._stages.prompts, self._config.batch.rollout_prompts
        source.taken = rollout * size
        return source.take(size)

    def _begin_ahead(self, training: int, step: Step) -> None:
        """What may be generated while rollout `training` is trained."""
        while self._ahead.wants(rollout := training + 1 + len(self._begun), training):
            if not self._ahead.may_begin(rollout, self._engine_version, step.version, self._engine_is_idle()):
                return
            self._begun.append(self._begin(self._prompts(rollout), self._config.grading.num_generations, step))

    def _draw(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], step: Step, answered: Callable[[], None]
    ) -> list[Graded]:
        """Generated and graded, and dumped if asked for; or as another run has dumped them."""
        stages, num_generations = self._stages, self._config.grading.num_generations
        if stages.replay is not None:
            with step.timer("replay"):
                return total_rewards(*stages.replay.take(rollout, draw, prompts, num_generations), self._config.grading)
        if draw == 0 and self._begun:
            begun = self._begun.popleft()
        else:
            begun = self._begin(prompts, num_generations, step)
        graded = self._grade(begun, step, answered)
        if stages.dump is not None:
            write = partial(stages.dump.write, rollout, draw, graded)
            with step.timer("dump"):
                stages.coordinator.all_gather_or_raise(write, "--rollout_dump")
        return graded

    def _replace_uniform_groups(self, rollout: int, graded: list[Graded], step: Step) -> list[Graded]:
        grading, per_rollout = self._config.grading, self._config.batch.rollout_prompts
        # Where the spare prompts go on depends on the rollout's number only, so a resumed run draws the same ones.
        self._stages.spare_prompts.taken = (rollout + 1) * grading.max_resample_times * per_rollout

        draws = count(1)  # the first one is in `graded`

        def draw(groups: int) -> list[Graded]:
            return self._draw(rollout, next(draws), self._stages.spare_prompts.take(groups), step, _nothing)

        found = resample(graded, grading.num_generations, grading.max_resample_times, draw)
        if found.uniform:
            logger.warning(
                f"{found.uniform} of {per_rollout} groups have equal rewards after --max_resample_times "
                f"{grading.max_resample_times} rounds; they stay in the batch, with advantages of 0"
            )
        step.metrics.update(found.metrics())
        return found.graded

    # ---- generation

    def _begin(self, prompts: Sequence[Prompt], num_generations: int, step: Step) -> _Begun:
        """With the newest weights; or, beside what the engine is answering, with those that it has."""
        engine, sync = self._stages.generation, self._stages.sync
        assert engine is not None and sync is not None
        if self._engine_is_idle():
            step.metrics.update(sync.to_engine(step.version, step.timer))
            self._engine_version = step.version
        requests = requests_for(prompts, num_generations, self._config.sampling.seed, self._engine_version)
        generation = engine.generate(engine.share.pick(requests), num_generations, self._config.sampling)
        return _Begun(generation, num_generations, len(requests), {self._engine_version})

    def _engine_is_idle(self) -> bool:
        """Only the rank that speaks to servers knows when they have answered all."""
        runs = any(begun.generation.is_running for begun in self._begun)
        return not (self._begun and any(self._stages.coordinator.all_gather(runs)))

    def _collect(self, begun: _Begun, step: Step) -> Iterator[dict[int, Rollout]]:
        """One completion for each request, on every rank: whole groups, as they are complete."""
        if begun.kept:
            with step.timer("generation"):  # which nobody waits for: 0 in the log, not nothing
                kept, begun.kept = begun.kept, {}
            yield kept
        while begun.missing:
            news = partial(begun.generation.next, step.version)
            with step.timer("generation"):
                told = self._stages.coordinator.all_gather_or_raise(news, "generating completions")
            if any(each.needs_weights for each in told):
                self._resend(begun, step)
            finished = {index: rollout for each in told for index, rollout in each.finished.items()}
            _check_versions(finished.values(), begun.versions)
            begun.missing -= len(finished)
            if finished:
                yield finished

    def _resend(self, begun: _Begun, step: Step) -> None:
        """To a server that was started anew. Weights that are no longer the trainer's are gone if no server has them:
        then what they have left unanswered is answered by the trainer's."""
        assert self._stages.sync is not None
        self._stages.sync.resend(step.version, step.timer)
        self._engine_version = step.version
        for each in (begun, *self._begun):
            if each.missing:
                each.versions.add(step.version)

    # ---- grading

    def _grade(self, begun: _Begun, step: Step, answered: Callable[[], None] = _nothing) -> list[Graded]:
        """Group by group, as they come. `answered` is called when the engine has done its part."""
        rollouts: dict[int, Rollout] = {}
        rewards: dict[int, list[float | None]] = {}
        for groups in self._collect(begun, step):
            if not begun.missing:
                self._release_engine(step)
                answered()
            with step.timer("grading"):
                rewards |= zip(groups, self._score(list(groups.values()), begun.group), strict=True)
            rollouts |= groups
        order = range(len(rollouts))
        return total_rewards([rollouts[i] for i in order], [rewards[i] for i in order], self._config.grading)

    def _release_engine(self, step: Step) -> None:
        """Where it shares GPUs with the policy, which comes back while rewards are computed."""
        assert self._stages.generation is not None
        with step.timer("phase_switch"):
            self._stages.generation.sleep()
            self._stages.residency.for_inference()

    def _score(self, rollouts: list[Rollout], group: int) -> list[list[float | None]]:
        """Every rank grades some groups, whole ones, and tells the others."""
        groups = [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
        coordinator, functions = self._stages.coordinator, self._stages.rewards
        share = Share(coordinator.rank, coordinator.world_size, reports=True)
        mine = [rollout for each in share.pick(groups) for rollout in each]
        parts = coordinator.all_gather_or_raise(
            lambda: call_reward_functions(mine, functions, self._trainer_state, self._reward_limit) if mine else [],
            "grading",
        )
        return [row for part in parts for row in part]

    @contextmanager
    def _reward_limit(self, what: str) -> Iterator[float | None]:
        seconds = self._config.deadlines.reward
        if seconds is None:
            yield None
        else:
            with self._stages.watchdog.limit(what, seconds, "--reward_timeout"):
                yield seconds


def _check_versions(rollouts: Iterable[Rollout], asked: set[int]) -> None:
    others = {rollout.weights_version for rollout in rollouts} - asked
    if others:
        raise RuntimeError(
            f"completions of weights {sorted(others)} came back where those of {' or '.join(map(str, sorted(asked)))} "
            "were asked for: the engine has not generated with the weights of the last sync"
        )
