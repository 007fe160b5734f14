"""Rollouts, from prompts to graded completions: the one that is trained next, and those started ahead of it.

prompts -> generation -> grading -> (other prompts for groups of equal rewards)

With --max_staleness 0 a rollout starts when it is needed. Above 0, later rollouts start as soon as the engine has
finished this one, and are generated while this one is graded and trained; run_ahead.py has the rule.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from swift_megatron_grpo.generation.interface import (
    BatchGeneration,
    Generation,
    Progress,
    Share,
    evaluation_requests,
    requests_for,
)
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.grading import call_reward_functions, resample, total_rewards
from swift_megatron_grpo.loop.checks.expert_checks import check_experts
from swift_megatron_grpo.loop.logprob_requests import LogprobRequests
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.output.recording.earlier import Recorded
from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.settings.config import EvaluationConfig, GRPOConfig, SamplingConfig
from swift_megatron_grpo.types import Graded, Prompt, Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingRollout:
    """A rollout whose generation has started."""

    generation: Generation
    prompts: Sequence[Prompt]
    group_size: int  # completions of one prompt
    missing: int  # completions not received yet
    versions: set[int]  # of weights that may generate it
    earlier: Recorded = field(default_factory=dict)  # an earlier run has generated and graded these
    kept: dict[int, Rollout] = field(default_factory=dict)  # received before they were needed


def _do_nothing() -> None: ...


_NOTHING = BatchGeneration(dict)


class Rollouts:
    """The rollouts of a run, in order. Every rank calls every method."""

    def __init__(self, config: GRPOConfig, stages: Stages, trainer_state: Any, ahead: RunAhead) -> None:
        self._config, self._stages = config, stages
        self._trainer_state = trainer_state  # reward functions may read it
        self._ahead = ahead
        self._next = ahead.first_rollout  # the number of the rollout that is trained next
        self._first = ahead.first_rollout  # the number of the first one that this run generates
        self._logprobs = LogprobRequests.of(
            config.loss.correction, config.max_staleness, config.recording.dump is not None, config.logprobs_interval
        )
        self._pending: deque[_PendingRollout] = deque()  # that rollout, if it has started, and those after it
        self._engine_version = NO_WEIGHTS  # of the last weights sent
        self._uses_earlier = config.recording.continues and stages.dump is not None

    def take(self, step: StepContext) -> list[Graded]:
        """Return the next rollout with its total rewards."""
        number, resamples = self._next, self._config.grading.max_resample_times > 0
        self._next += 1
        start_ahead = partial(self._start_ahead, number, step)
        graded = self._draw(number, 0, self._prompts(number), step, _do_nothing if resamples else start_ahead)
        if resamples:  # this generates more, so later rollouts start only afterwards
            graded = self._replace_uniform_groups(number, graded, step)
            start_ahead()
        if self._ahead.max_staleness:
            stale = [self._ahead.staleness(number, completion.rollout.weights_version) for completion in graded]
            step.metrics["rollout/staleness"] = sum(stale) / len(stale)
            step.metrics["rollout/staleness_max"] = max(stale)
        return graded

    @property
    def last(self) -> int:
        """The number of the rollout taken last."""
        return self._next - 1

    def skip(self) -> None:
        """Leave out the next rollout, which the checkpoint of a resumed run contains."""
        self._next += 1
        self._first = self._next

    def evaluate(self, prompts: Sequence[Prompt], evaluation: EvaluationConfig, step: StepContext) -> list[Graded]:
        """Generate with the current weights and grade. Pending rollouts are finished first, and kept."""
        for pending in self._pending:
            for groups in self._collect(pending, step):
                pending.kept |= groups
        generations, sampling = evaluation.num_generations, evaluation.sampling
        return self._grade(self._start(prompts, generations, sampling, step, for_training=False), step)

    # ---- the rollouts of the run, by their numbers

    def _prompts(self, rollout: int) -> list[Prompt]:
        """Return the prompts of a rollout.

        They depend on its number alone, so a resumed run starts the rollouts again that were pending at the checkpoint.
        """
        source, size = self._stages.prompts, self._config.batch.rollout_prompts
        source.taken = rollout * size
        return source.take(size)

    def _start_ahead(self, training: int, step: StepContext) -> None:
        """Start the rollouts that may be generated while rollout `training` is trained."""
        while self._ahead.in_window(rollout := training + 1 + len(self._pending), training):
            if not self._ahead.may_start(rollout, self._engine_version, step.version, self._engine_is_idle()):
                return
            self._pending.append(self._start_rollout(rollout, 0, self._prompts(rollout), step))

    def _draw(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext, on_generated: Callable[[], None]
    ) -> list[Graded]:
        """Generate and grade, and dump with --rollout_dump; or read the dump of another run."""
        stages, num_generations = self._stages, self._config.grading.num_generations
        if stages.replay is not None:
            with step.timer("replay"):
                replayed, rewards = stages.replay.take(rollout, draw, prompts, num_generations)
                self._check_experts(replayed)
                return total_rewards(replayed, rewards, self._config.grading)
        if draw == 0 and self._pending:
            pending = self._pending.popleft()
        else:
            pending = self._start_rollout(rollout, draw, prompts, step)
        append = None if stages.dump is None else partial(stages.dump.append, rollout, draw)
        graded = self._grade(pending, step, on_generated, append)
        if stages.dump is not None:
            write = partial(stages.dump.write, rollout, draw, graded)
            with step.timer("dump"):
                stages.coordinator.all_gather_or_raise(write, "--rollout_dump")
        return graded

    def _replace_uniform_groups(self, rollout: int, graded: list[Graded], step: StepContext) -> list[Graded]:
        """Replace groups of equal rewards by groups of spare prompts."""
        grading, per_rollout = self._config.grading, self._config.batch.rollout_prompts
        # The position in the spare prompts depends on the rollout's number only, so a resumed run draws the same ones.
        self._stages.spare_prompts.taken = (rollout + 1) * grading.max_resample_times * per_rollout

        draws = count(1)  # the first one is in `graded`

        def draw(groups: int) -> list[Graded]:
            return self._draw(rollout, next(draws), self._stages.spare_prompts.take(groups), step, _do_nothing)

        resampled = resample(graded, grading.num_generations, grading.max_resample_times, draw)
        if resampled.uniform:
            logger.warning(
                f"{resampled.uniform} of {per_rollout} groups have equal rewards after --max_resample_times "
                f"{grading.max_resample_times} rounds; they stay in the batch, with advantages of 0"
            )
        step.metrics.update(resampled.metrics())
        return resampled.graded

    # ---- generation

    def _start_rollout(self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext) -> _PendingRollout:
        """Start the generation of what no earlier run has dumped of a rollout."""
        earlier = self._earlier(rollout, draw, prompts, step)
        sampling = replace(self._config.sampling, logprobs=self._logprobs.includes(rollout, self._first))
        return self._start(prompts, self._config.grading.num_generations, sampling, step, earlier=earlier)

    def _earlier(self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext) -> Recorded:
        """Return the completions that an earlier run has dumped, on every rank; rank 0 reads them.

        They are used up to the first rollout that is not complete: its other completions differ from those with which
        the earlier run went on.
        """
        if not self._uses_earlier:
            return {}
        coordinator, size = self._stages.coordinator, self._config.grading.num_generations

        def accepts(version: int) -> bool:
            if not self._ahead.max_staleness:
                return version == step.version
            return 0 <= self._ahead.staleness(rollout, version) <= self._ahead.max_staleness

        def read() -> Recorded:
            reader = self._stages.earlier
            found = {} if reader is None else reader.take(rollout, draw, prompts, size, accepts)
            return {
                i: (replace(r, prompt=Prompt(r.prompt.prompt_id, {})), rewards) for i, (r, rewards) in found.items()
            }

        with step.timer("replay"):
            gathered = coordinator.all_gather_or_raise(read, "reading dumped rollouts")
        found = {index: value for part in gathered for index, value in part.items()}
        self._uses_earlier = len(found) == len(prompts) * size
        return {index: (replace(r, prompt=prompts[index // size]), rewards) for index, (r, rewards) in found.items()}

    def _start(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingConfig,
        step: StepContext,
        for_training: bool = True,
        earlier: Recorded | None = None,
    ) -> _PendingRollout:
        """Start a generation: with the newest weights if the engine is idle, otherwise with those that it has.

        `earlier`: completions that are not generated again.
        """
        engine, sync, earlier = self._stages.generation, self._stages.sync, earlier or {}
        assert engine is not None and sync is not None
        if len(earlier) == len(prompts) * num_generations:
            return _PendingRollout(_NOTHING, prompts, num_generations, 0, set(), earlier)
        if self._engine_is_idle():
            step.metrics.update(sync.to_engine(step.version, step.timer))
            self._engine_version = step.version
        if for_training:
            with_experts = self._config.routing.requested(len(prompts) * num_generations)
            requests = requests_for(prompts, num_generations, sampling.seed, self._engine_version, with_experts)
        else:
            assert sampling.seed is not None
            requests = evaluation_requests(prompts, num_generations, sampling.seed)
        requests = [request for request in requests if request.index not in earlier]
        generation = engine.generate(engine.share.pick(requests), num_generations, sampling)
        return _PendingRollout(generation, prompts, num_generations, len(requests), {self._engine_version}, earlier)

    def _engine_is_idle(self) -> bool:
        """Return True if no generation is running. With servers, only rank 0 has this information."""
        running = any(pending.generation.is_running for pending in self._pending)
        return not (self._pending and any(self._stages.coordinator.all_gather(running)))

    def _collect(self, pending: _PendingRollout, step: StepContext) -> Iterator[dict[int, Rollout]]:
        """Yield whole groups of completions as they finish, on every rank, until the rollout is complete."""
        if pending.kept:
            with step.timer("generation"):  # takes no time, but the log then has a 0 for the phase
                kept, pending.kept = pending.kept, {}
            yield kept
        while pending.missing:
            gathered = self._wait(pending, step)
            if any(progress.needs_weights for progress in gathered):
                self._resend(pending, step)
            finished = {index: rollout for progress in gathered for index, rollout in progress.finished.items()}
            _check_versions(finished.values(), pending.versions)
            pending.missing -= len(finished)
            if finished:
                yield finished

    def _wait(self, pending: _PendingRollout, step: StepContext) -> list[Progress]:
        """Wait for the progress of a generation, on all ranks."""
        coordinator = self._stages.coordinator

        def wait() -> Progress:
            """Leave out the rows, which every rank has: their images may be many megabytes."""
            progress = pending.generation.next(step.version)
            self._check_experts(progress.finished.values())
            return _with_rows(progress, lambda index, prompt: Prompt(prompt.prompt_id, {}))

        def own_row(index: int, prompt: Prompt) -> Prompt:
            return pending.prompts[index // pending.group_size]

        with step.timer("generation"):
            try:
                gathered = coordinator.all_gather_or_raise(wait, "generating completions")
                return [_with_rows(progress, own_row) for progress in gathered]
            except SharedFailure:
                assert self._stages.generation is not None
                self._stages.generation.sleep()  # all ranks save a checkpoint next, which may need the memory
                raise

    def _check_experts(self, rollouts: Iterable[Rollout]) -> None:
        if self._config.routing.requested(1):
            layers = self._stages.training.passes.expert_layers
            assert layers is not None  # settings/routing.py refuses other models
            check_experts(rollouts, layers)

    def _resend(self, pending: _PendingRollout, step: StepContext) -> None:
        """Resend weights to a restarted server.

        If no server still has the version this rollout started with, its remaining requests are answered with the
        trainer's current weights.
        """
        assert self._stages.sync is not None
        self._stages.sync.resend(step.version, step.timer)
        self._engine_version = step.version
        for rollout in (pending, *self._pending):
            if rollout.missing:
                rollout.versions.add(step.version)

    # ---- grading

    def _grade(
        self,
        pending: _PendingRollout,
        step: StepContext,
        on_generated: Callable[[], None] = _do_nothing,
        append: Callable[[list[Graded]], None] | None = None,
    ) -> list[Graded]:
        """Grade groups as they finish. Calls `on_generated` when the engine has finished the whole rollout.

        `append`: stores each group once it is graded.
        """
        rollouts = {index: rollout for index, (rollout, _) in pending.earlier.items()}
        rewards = {index: graded for index, (_, graded) in pending.earlier.items()}
        if pending.generation is _NOTHING:
            on_generated()
        for groups in self._collect(pending, step):
            if not pending.missing:
                self._release_engine(step)
                on_generated()
            with step.timer("grading"):
                rewards |= zip(groups, self._call_rewards(list(groups.values()), pending.group_size), strict=True)
            rollouts |= groups
            if append is not None and len(rollouts) < len(pending.prompts) * pending.group_size:
                append([Graded(rollouts[index], rewards[index], None, 0.0) for index in sorted(groups)])
        order = range(len(rollouts))
        return total_rewards([rollouts[i] for i in order], [rewards[i] for i in order], self._config.grading)

    def _release_engine(self, step: StepContext) -> None:
        """Put an engine that shares GPUs to sleep, and start to reload the policy while rewards are computed."""
        assert self._stages.generation is not None
        with step.timer("phase_switch"):
            self._stages.generation.sleep()
            self._stages.residency.for_inference()

    def _call_rewards(self, rollouts: list[Rollout], group_size: int) -> list[list[float | None]]:
        """Compute rewards: every rank grades some whole groups and sends the results to the others."""
        groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        coordinator, functions = self._stages.coordinator, self._stages.rewards
        state, drops = self._trainer_state, self._config.grading.bad_reward == "drop"
        share = Share(coordinator.rank, coordinator.world_size, reports=True)
        local = [rollout for group in share.pick(groups) for rollout in group]
        gathered = coordinator.all_gather_or_raise(
            lambda: call_reward_functions(local, functions, state, self._reward_limit, drops) if local else [],
            "grading",
        )
        return [row for rows in gathered for row in rows]

    @contextmanager
    def _reward_limit(self, what: str) -> Iterator[float | None]:
        seconds, stop = self._config.deadlines.reward_timeout, self._stages.stop
        try:
            with self._stages.watchdog.limit(what, seconds, "--reward_timeout", stop.out_of_time):
                yield seconds
        except DeadlineExceeded:
            if stop.out_of_time():
                raise stop.give_up(what) from None
            raise


def _with_rows(progress: Progress, prompt_of: Callable[[int, Prompt], Prompt]) -> Progress:
    """Return the same progress with other prompts, by index of the request."""
    finished = {
        index: replace(rollout, prompt=prompt_of(index, rollout.prompt)) for index, rollout in progress.finished.items()
    }
    return replace(progress, finished=finished)


def _check_versions(rollouts: Iterable[Rollout], allowed: set[int]) -> None:
    unexpected = {rollout.weights_version for rollout in rollouts} - allowed
    if unexpected:
        raise RuntimeError(
            f"completions of weights {sorted(unexpected)} were returned instead of "
            f"{' or '.join(map(str, sorted(allowed)))}: the engine did not generate with the weights of the last sync"
        )
