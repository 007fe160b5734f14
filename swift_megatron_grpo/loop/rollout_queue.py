"""The generations of a run: the rollout that is trained next, and those started ahead of it.

With --max_staleness 0 a rollout starts when it is needed. Above 0, later rollouts start as soon as the engine has
finished this one, and are generated while this one is graded and trained; run_ahead.py has the rule. With
--in_flight_weight_updates they start before it has: the engine is sent newer weights while it generates.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swift_megatron_grpo.generation.interface import Generation, Request, requests_for
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.loop.bodies import Outlines
from swift_megatron_grpo.loop.checks.experts import check_experts
from swift_megatron_grpo.loop.finished import NONE_FINISHED, Finished, Scored
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.spare_groups import SpareGroups
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.output.recording.reading import Recorded
from swift_megatron_grpo.packing import completions
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.settings.config import EvaluationConfig, GRPOConfig, SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout


@dataclass(slots=True)
class StartedRollout:
    """A rollout, or an evaluation, whose generation has started."""

    prompts: Sequence[Prompt]
    group_size: int  # completions of one prompt
    recorded: Scored  # generated and graded before: by an earlier run, or as spare ones
    generation: Generation | None = None  # None: all are recorded
    missing: int = 0  # completions not received yet
    versions: set[int] = field(default_factory=set)  # of weights that may generate them
    is_read_whole: bool = False  # every rank reads the tokens of all completions
    kept: Finished = NONE_FINISHED  # received before they were needed

    @property
    def size(self) -> int:
        return len(self.prompts) * self.group_size


class RolloutQueue:
    """Starts rollouts, and collects their completions in order. Every rank calls every method."""

    def __init__(self, config: GRPOConfig, stages: Stages, ahead: RunAhead, spares: SpareGroups) -> None:
        self._config = config
        self._stages = stages
        self._ahead = ahead
        self._spares = spares
        self._started: deque[StartedRollout] = deque()  # ahead of the one that is collected
        self._engine_version = NO_WEIGHTS  # of the last weights sent
        self._in_flight = config.in_flight_weight_updates
        self.first = ahead.first_rollout  # the number of the first one that this run generates
        self._reads_recorded = config.recording.continues and stages.dump is not None

    # ---- start

    def prompts(self, rollout: int) -> list[Prompt]:
        """Return the prompts of a rollout. They depend on its number alone, also in a resumed run."""
        source = self._stages.prompts
        size = self._config.batch.rollout_prompts
        source.taken = rollout * size
        return source.take(size)

    def drawn_prompts(self, rollout: int, first: int, count: int) -> list[Prompt]:
        """Return prompts for groups that replace uniform ones of a rollout; they depend on its number alone, too.

        `first`: the number of prompts that were drawn for this rollout before.
        """
        source = self._stages.spare_prompts
        source.taken = (rollout + 1) * self._spares.most + first
        return source.take(count)

    def take(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext, ready: Scored
    ) -> StartedRollout:
        """Return one draw of a rollout; it starts now unless it was started ahead. `ready`: what is graded already."""
        if draw == 0 and self._started:
            return self._started.popleft()
        return self._start_draw(rollout, draw, prompts, step, ready)

    def start_ahead(self, training: int, step: StepContext) -> None:
        """Start the rollouts that may be generated while rollout `training` is trained."""
        while self._ahead.in_window(rollout := training + 1 + len(self._started), training):
            idle = self._in_flight or self._engine_is_idle()
            if not self._ahead.may_start(rollout, self._engine_version, step.version, idle):
                return
            self._started.append(self._start_draw(rollout, 0, self.prompts(rollout), step, self.nothing_scored()))

    def start_evaluation(
        self, prompts: Sequence[Prompt], evaluation: EvaluationConfig, step: StepContext
    ) -> StartedRollout:
        """Start to generate with the current weights. Rollouts that have started are finished first, and kept."""
        for started in self._started:
            while started.missing:
                started.kept = Finished.joined([started.kept, self._receive(started, step)])
        self._prepare_engine(step)
        sampling = evaluation.sampling
        assert sampling.seed is not None
        evaluated = StartedRollout(prompts, evaluation.num_generations, self.nothing_scored(), is_read_whole=True)
        requests = requests_for(prompts, evaluated.group_size, sampling.seed, version=None)
        self._generate(evaluated, requests, sampling)
        return evaluated

    def _start_draw(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], step: StepContext, ready: Scored
    ) -> StartedRollout:
        """Start to generate what is not there of a draw, and spare groups with the first one."""
        logprobs = logprobs_requested(self._config, rollout, self.first)
        sampling = replace(self._config.sampling, logprobs=logprobs)
        group_size = self._config.grading.num_generations
        earlier = self._recorded(rollout, draw, prompts, group_size, step)  # none if there are spare ones
        started = StartedRollout(prompts, group_size, Scored.joined([ready, earlier]))
        if len(started.recorded) < started.size:
            self._prepare_engine(step)
            if draw == 0:
                started.prompts = [*prompts, *self.drawn_prompts(rollout, 0, self._spares.wanted())]
            with_experts = self._config.routing.requested(started.size)
            requests = requests_for(
                started.prompts, started.group_size, sampling.seed, self._engine_version, with_experts
            )
            recorded = set(started.recorded.indices.tolist())
            self._generate(started, [request for request in requests if request.index not in recorded], sampling)
        return started

    def _prepare_engine(self, step: StepContext, collected: Sequence[StartedRollout] = ()) -> None:
        """Send the newest weights to an idle engine, and in flight to a busy one, which otherwise keeps those it has.

        `collected`: a rollout that may be running besides those that were started ahead.
        """
        assert self._stages.sync is not None
        if self._in_flight or self._engine_is_idle():
            step.metrics.update(self._stages.sync.to_engine(step.version, step.timer))
            self._set_version(step.version, collected)

    def _set_version(self, version: int, collected: Sequence[StartedRollout]) -> None:
        """Remember that these weights may generate the completions that are missing."""
        self._engine_version = version
        for rollout in (*collected, *self._started):
            if rollout.missing:
                rollout.versions.add(version)

    def _generate(self, started: StartedRollout, requests: list[Request], sampling: SamplingConfig) -> None:
        engine = self._stages.generation
        assert engine is not None
        started.generation = engine.generate(
            engine.share.pick(requests, started.group_size), started.group_size, sampling
        )
        started.missing = len(requests)
        started.versions = {self._engine_version}

    def _engine_is_idle(self) -> bool:
        """Return True if no generation is running. With servers, only rank 0 has this information."""
        if not self._started:
            return True
        runs = any(started.generation is not None and started.generation.is_running for started in self._started)
        return not any(self._stages.coordinator.all_gather(runs))

    def nothing_scored(self) -> Scored:
        return Scored.of({}, len(self._config.grading.reward_names))

    def _recorded(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], group_size: int, step: StepContext
    ) -> Scored:
        """Return the completions that an earlier run has dumped, on every rank; rank 0 reads them.

        They are used up to the first rollout that is not complete: with its other completions, the earlier run trained
        other weights.
        """
        if not self._reads_recorded:
            return self.nothing_scored()

        def accepts(version: int) -> bool:
            if not self._ahead.max_staleness:
                return version == step.version
            return 0 <= self._ahead.staleness(rollout, version) <= self._ahead.max_staleness

        def read() -> Recorded:
            if self._stages.earlier is None:
                return {}
            found = self._stages.earlier.take(rollout, draw, prompts, group_size, accepts)
            return {index: (_without_row(completion), rewards) for index, (completion, rewards) in found.items()}

        with step.timer("replay"):
            gathered = self._stages.coordinator.all_gather_or_raise(read, "reading dumped rollouts")
        found = {index: value for part in gathered for index, value in part.items()}
        self._reads_recorded = len(found) == len(prompts) * group_size
        with_rows = {
            index: (replace(completion, prompt=prompts[index // group_size]), rewards)
            for index, (completion, rewards) in found.items()
        }
        return Scored.of(with_rows, len(self._config.grading.reward_names))

    # ---- collect

    def collect(self, started: StartedRollout, step: StepContext, ahead_of: int | None = None) -> Iterator[Finished]:
        """Yield whole groups as they finish. Before the last ones, release the engine and start rollouts ahead.

        With weights in flight, rollouts ahead start before the first ones.
        """
        if self._in_flight and started.missing:
            self._prepare_engine(step, [started])
        if ahead_of is not None and (self._in_flight or started.generation is None):
            self.start_ahead(ahead_of, step)
        while started.kept or started.missing:
            assert self._stages.generation is not None
            if started.kept:
                with step.timer("generation"):  # no time passes, but the log then has a 0 for the phase
                    groups, started.kept = started.kept, NONE_FINISHED
            else:
                groups = self._receive(started, step)
            if not groups:
                continue
            if not started.missing:
                with step.timer("phase_switch"):
                    self._stages.generation.sleep()  # an engine that shares GPUs
                    self._stages.residency.for_inference()  # the policy reloads while rewards are computed
                if ahead_of is not None:
                    self.start_ahead(ahead_of, step)
            yield groups

    def _receive(self, started: StartedRollout, step: StepContext) -> Finished:
        """Wait for progress of a generation, on all ranks; return the groups that have finished, if any."""
        with step.timer("generation"):
            finished, needs_weights = self._wait(started, step)
        if needs_weights:
            assert self._stages.sync is not None
            self._stages.sync.resend(step.version, step.timer)
            # newer weights generate the rest, if no server has those of its start any more
            self._set_version(step.version, [started])
        unexpected = set(np.unique(completions.spans(finished.rollouts).versions).tolist()) - started.versions
        if unexpected:
            raise RuntimeError(
                f"completions of weights {sorted(unexpected)} were returned instead of "
                f"{' or '.join(map(str, sorted(started.versions)))}: the engine did not generate with the weights of "
                "the last sync"
            )
        started.missing -= len(finished)
        return finished

    def _wait(self, started: StartedRollout, step: StepContext) -> tuple[Finished, bool]:
        """Return what has finished on any rank, and whether an engine waits for weights."""
        bodies = None if started.is_read_whole else self._stages.bodies
        engine = self._stages.generation
        generation = started.generation
        assert engine is not None and generation is not None

        def wait() -> tuple[Outlines | dict[int, Rollout], bool]:
            progress = generation.next(step.version)
            self.check_experts(progress.finished.values())
            finished = {index: _without_row(completion) for index, completion in progress.finished.items()}
            return bodies.outlines(finished) if bodies is not None else finished, progress.needs_weights

        try:
            gathered = self._stages.coordinator.all_gather_or_raise(wait, "generating completions")
        except SharedFailure:
            engine.sleep()  # all ranks save a checkpoint next, which may need the memory
            raise
        parts = [part for part, _ in gathered]
        if bodies is not None:
            outlines = [part for part in parts if isinstance(part, Outlines)]
            finished = bodies.read(outlines, started.prompts, started.group_size)
        else:
            every = {
                index: replace(completion, prompt=started.prompts[index // started.group_size])
                for part in parts
                if isinstance(part, dict)
                for index, completion in part.items()
            }
            finished = Finished.of(every)
        return finished, any(needs_weights for _, needs_weights in gathered)

    def check_experts(self, rollouts: Iterable[Rollout]) -> None:
        """Raise WrongExperts for experts that no router of this model can have chosen."""
        if self._config.routing.requested(1):
            layers = self._stages.training.passes.expert_layers
            assert layers is not None  # settings/routing.py refuses other models
            check_experts(rollouts, layers)


def logprobs_requested(config: GRPOConfig, rollout: int, first: int) -> bool:
    """Return True if vLLM returns log-probs with a rollout. `first`: the first one that this run generates.

    They cost 4 to 11 % of the time of generation of small models (benchmarks/h200/parts/scheduling.json). Corrections
    and their metrics compare them with the trainer's, the off-policy mask prefers them, asynchronous runs and
    --old_logprobs engine take them for old log-probs, and a dump keeps them for a replay with any of these. Rollouts
    with predicted drafts are compared with the trainer, all of them. If nothing
    but `rollout/k3_kl` reads them, they are requested at an interval (0: never), and for the first rollout, which
    checks/logprob_check.py compares.
    """
    correction = config.loss.correction
    return (
        correction.rollout_importance_sampling_mode is not None
        or correction.log_rollout_offpolicy_metrics
        or correction.off_policy_sequence_mask_delta is not None
        or correction.m2_threshold is not None
        or correction.old_logprobs == "engine"
        or config.max_staleness > 0
        or config.engine.predicts_drafts
        or config.recording.dump is not None
        or rollout == first
        or (config.rollout_logprobs_interval > 0 and rollout % config.rollout_logprobs_interval == 0)
    )


def _without_row(rollout: Rollout) -> Rollout:
    """Return a rollout without its prompt's row, which every rank has: its images may be many megabytes."""
    return replace(rollout, prompt=Prompt(rollout.prompt.prompt_id, {}))
