"""The rollout in training: its completions as samples, in one batch for each optimizer step that it feeds.

A checkpoint between two of these steps keeps the rollout, and a resumed run continues it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby, islice, pairwise

import numpy as np

from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.token_baselines import energies, token_advantages
from swift_megatron_grpo.loop.samples import as_teacher_reads, engine_experts, samples_of, without_routing
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import StepContext
from swift_megatron_grpo.output.recording.unfinished import OF_SAMPLES, UnfinishedRollout, shared_settings
from swift_megatron_grpo.packing import completions
from swift_megatron_grpo.packing.outlines import Outline, changed
from swift_megatron_grpo.settings.algorithm import OPTIMAL_TOKEN
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.losses import Correction
from swift_megatron_grpo.training.loss.correction import weights_of_completion
from swift_megatron_grpo.types import Graded, Rollout, Sample


class TrainingBatches:
    """The batches of one rollout after the other. Every rank calls every method."""

    def __init__(self, config: GRPOConfig, stages: Stages, steps_done: int) -> None:
        self._config = config
        self._stages = stages
        self.steps_per_rollout = config.batch.steps_per_generation * config.num_iterations
        self.steps_to_skip = steps_done % self.steps_per_rollout  # of the first rollout, which a resumed run had done
        self._left: deque[Sequence[Sample]] = deque()  # one batch per optimizer step
        self._batches: list[Sequence[Sample]] = []  # of the whole rollout, each of them once
        self._rollout: UnfinishedRollout | None = None  # in training
        self._compared_with_engine = False

    @property
    def is_empty(self) -> bool:
        return not self._left

    def next(self) -> Sequence[Sample]:
        return self._left.popleft()

    def fill(self, number: int, graded: GradedRollouts, step: StepContext) -> None:
        """Queue the steps of a new rollout."""
        batches = self._batches_of(graded)
        self._compare_with_engine(batches[0], graded.rollouts, step)
        from_engine = old_logprobs_from_engine(graded.rollouts, step.version, self._config.loss.correction)
        self._add_other_policies(batches, from_engine, step)
        self._queue(number, graded, batches, from_engine, step)

    def resume(self, unfinished: UnfinishedRollout, step: StepContext) -> None:
        """Queue the steps that are left of a rollout that a checkpoint has interrupted, with its old log-probs."""
        batches = self._batches_of(unfinished.graded)
        for name in OF_SAMPLES:
            if name == "ref_logprobs" and self._stages.reference is None:  # --beta is 0 now
                continue
            if of_samples := getattr(unfinished, name):
                for sample, values in zip(chain.from_iterable(batches), of_samples, strict=True):
                    setattr(sample, name, values)
        is_known = bool(unfinished.ref_logprobs)
        self._queue(unfinished.number, unfinished.graded, batches, unfinished.from_engine, step, is_known)

    def unfinished(self, weights_version: int) -> UnfinishedRollout | None:
        """Return the rollout in training for a checkpoint; None if it holds the weights between two rollouts.

        None also with --router_replay_mode R2: each rank has the recorded experts of its own layers only.
        """
        between_rollouts = weights_version % self.steps_per_rollout == 0
        if self._rollout is None or between_rollouts or self._config.routing.router_replay_mode == "R2":
            return None
        samples = [self._with_old_logprobs(sample) for sample in chain.from_iterable(self._batches)]
        bodies, graded = self._stages.bodies, self._rollout.graded
        has_teacher, sdar = self._stages.teacher is not None, self._config.loss.sdar.is_on
        moves = self._stages.moving_reference is not None  # the one of the rollout's start no longer exists
        return replace(
            self._rollout,
            graded=graded if bodies is None else bodies.whole_on(0, graded),
            old_logprobs=self._gathered([sample.old_logprobs for sample in samples]),
            teacher_ratios=self._gathered([s.teacher_ratios for s in samples]) if has_teacher and not sdar else [],
            teacher_logprobs=self._gathered([s.teacher_logprobs for s in samples]) if sdar else [],
            token_advantages=[s.token_advantages for s in samples] if self._has_token_baselines else [],
            ref_logprobs=self._gathered([s.ref_logprobs for s in samples]) if moves else [],
        )

    def _with_old_logprobs(self, sample: Sample) -> Sample:
        """Return a sample with the engine's log-probs, if they are the old ones and this rank holds them."""
        if self._stages.bodies is None or sample.body is None:
            return sample
        held = self._stages.bodies.with_tokens(sample)
        is_here = held.old_logprobs is None or len(held.old_logprobs) == sample.trained
        return held if is_here else replace(held, old_logprobs=None)

    @property
    def _has_token_baselines(self) -> bool:
        return self._config.grading.advantage_estimator == OPTIMAL_TOKEN

    def _gathered(self, values: Sequence[list[float] | None]) -> list[list[float] | None]:
        """Return the values of all samples, of which a rank has those that it trains."""
        held = {index: value for index, value in enumerate(values) if value is not None}
        gathered = self._stages.coordinator.gather_samples(held, self._stages.training.parallel)
        return [gathered.get(index) for index in range(len(values))]

    def _batches_of(self, graded: Sequence[Graded]) -> list[Sequence[Sample]]:
        grading = self._config.grading
        size = self._config.batch.global_batch_size
        samples = samples_of(
            graded,
            grading.num_generations,
            grading.overlong_filter,
            self._stages.image_reader,
            replays_engine=self._config.routing.router_replay_mode == "R3",
            teacher_prompts=self._stages.teacher_prompts,
            tag_column=self._config.teacher.tag_column,
        )
        completions = Outline.of(samples).completions
        edges = np.searchsorted(completions, range(0, len(graded) + size, size)).tolist()
        return [samples[begin:end] for begin, end in pairwise(edges)]

    def _compare_with_engine(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], step: StepContext) -> None:
        """Compare log-probs with the engine's, once in a run or as often as drafts are predicted, and experts."""
        stages = self._stages
        done = self._compared_with_engine and not self._config.engine.predicts_drafts
        rounding = None if stages.sync is None or done else stages.sync.rounding
        if rounding is not None:
            with step.timer("sync_check"):
                stages.logprob_check.check(samples, rounding)
        self._compared_with_engine = True
        if stages.router_agreement is not None:
            with step.timer("router_agreement"):
                share = stages.router_agreement.measure(samples, engine_experts(rollouts))
            if share is not None:
                step.metrics["rollout/router_agreement"] = share

    def _add_other_policies(self, batches: list[Sequence[Sample]], from_engine: bool, step: StepContext) -> None:
        """Add the old log-probs, the denominator of the ratio, with R2 the experts that later steps replay, and ratios.

        The first step needs none of the old policy: it trains that itself. Every later step gets them from a pass
        before the first update. `from_engine`: the engine's log-probs take the place of the pass, for the first step as
        well. A teacher is compared with a pass in any case, except by SDAR, which compares it with the current policy.
        Baselines of tokens need the pass, too.
        """
        training = self._stages.training
        has_ratios = self._stages.teacher is not None and not self._config.loss.sdar.is_on
        of_all = has_ratios or self._has_token_baselines
        records_experts = self._config.routing.router_replay_mode == "R2"
        if records_experts or not from_engine or of_all:
            for samples in batches if self._config.num_iterations > 1 or of_all else batches[1:]:
                with step.timer("old_logprobs"):
                    values, experts = (
                        training.infer_and_record(samples) if records_experts else (training.infer(samples), {})
                    )
                for index, value in values.items():
                    samples[index].old_logprobs = value.logprobs
                for index, rows in experts.items():
                    samples[index].routed_experts = rows
        self._add_teacher(batches, step)
        if self._has_token_baselines:
            with step.timer("token_baselines"):
                self._add_token_advantages(batches)
        if from_engine:
            batches[:] = [changed(batch, _with_engine_logprobs) for batch in batches]

    def _add_teacher(self, batches: Sequence[Sequence[Sample]], step: StepContext) -> None:
        """Add the log-ratios of the teacher and the policy, whose old log-probs are from the same kind of pass.

        Passes of equal weights over the same samples round alike, so a teacher equal to the policy has ratios of 0.
        SDAR reads the teacher's log-probs themselves.
        """
        teacher = self._stages.teacher
        if teacher is None:
            return
        with step.timer("teacher_logprobs"):
            self._stages.residency.for_teacher()
            for samples in batches:
                for index, values in teacher.infer(as_teacher_reads(samples)).items():
                    policy = samples[index].old_logprobs
                    if self._config.loss.sdar.is_on:
                        samples[index].teacher_logprobs = values.logprobs
                    elif policy is not None:  # else another rank trains it
                        pairs = zip(values.logprobs, policy, strict=True)
                        samples[index].teacher_ratios = [theirs - ours for theirs, ours in pairs]

    def _add_token_advantages(self, batches: Sequence[Sequence[Sample]]) -> None:
        """Subtract from the reward of a completion, its advantage so far, a baseline for every token."""
        stages, correction, half = self._stages, self._config.loss.correction, self._config.sampling.temperature / 2
        held: dict[int, np.ndarray] = {}
        for first, batch in zip(accumulate(map(len, batches), initial=0), batches, strict=False):
            for index, value in stages.training.infer(batch, temperature=half).items():
                held[first + index] = corrected_energies(batch[index], value.logprobs, correction)
        gathered = stages.coordinator.gather_samples(held, stages.training.parallel)
        samples = list(chain.from_iterable(batches))
        for _, of_group in groupby(range(len(samples)), key=lambda i: samples[i].group):
            completions = [list(of) for _, of in groupby(of_group, key=lambda i: samples[i].completion)]
            rewards = [samples[sequences[0]].advantage for sequences in completions]
            joined = [np.concatenate([gathered[i] for i in sequences]) for sequences in completions]
            for sequences, advantages in zip(completions, token_advantages(rewards, joined), strict=True):
                rest = iter(advantages)
                for i in sequences:
                    samples[i].token_advantages = list(islice(rest, len(gathered[i])))

    def _queue(
        self,
        number: int,
        graded: Sequence[Graded],
        batches: list[Sequence[Sample]],
        from_engine: bool,
        step: StepContext,
        reference_is_known: bool = False,
    ) -> None:
        """Add reference log-probs, and queue a batch for each optimizer step: `num_iterations` times all of them."""
        reference = self._stages.reference
        if reference is not None and not self._config.kl.kl_in_reward and not reference_is_known:
            with step.timer("ref_logprobs"):
                self._stages.residency.for_reference()
                for samples in batches:
                    for index, values in reference.infer(without_routing(samples)).items():
                        samples[index].ref_logprobs = values.logprobs
        first = batches[0] if from_engine else changed(batches[0], _without_old_logprobs)
        steps = [first, *batches[1:], *batches * (self._config.num_iterations - 1)]
        self._left.extend(steps[self.steps_to_skip :])
        self.steps_to_skip = 0
        self._batches = batches
        self._rollout = UnfinishedRollout(number, shared_settings(self._config), graded, [], from_engine)


def _with_engine_logprobs(sample: Sample) -> Sample:
    return replace(sample, old_logprobs=sample.rollout_logprobs)


def _without_old_logprobs(sample: Sample) -> Sample:
    return replace(sample, old_logprobs=None)


def corrected_energies(sample: Sample, sharper: Sequence[float], correction: Correction) -> np.ndarray:
    """Return the energies of a completion's tokens, times the squared weights of a rollout correction, as in verl."""
    policy, engine = sample.old_logprobs, sample.rollout_logprobs
    assert policy is not None  # from a pass with the plan of `sharper`
    energy = energies(policy, sharper)
    if correction.rollout_importance_sampling_mode is not None and engine is not None:
        energy = energy * weights_of_completion(policy, engine, correction) ** 2
    return energy


def old_logprobs_from_engine(rollouts: Sequence[Rollout], version: int, correction: Correction) -> bool:
    """Return True if the engine's log-probs are the old log-probs, instead of the trainer's own.

    True with --old_logprobs engine, and for completions of older weights without a rollout correction. The ratio and
    its clipping then account for how far the policy has moved since; a correction would weight the completions by that.
    """
    if correction.old_logprobs == "policy" and (completions.versions(rollouts) == version).all():
        return False
    without = not completions.all_have_logprobs(rollouts)
    if correction.old_logprobs == "engine" and without:
        raise RuntimeError(
            "completions came without the engine's log-probs, which --old_logprobs engine trains with; use "
            "--old_logprobs policy or, with --rollout_replay, a folder with logprobs"
        )
    if without:
        raise RuntimeError(
            f"completions of other weights than the trainer's ({version}) came without the engine's log-probs, which "
            "alone measure how far the policy has moved since; use --async_generate false or, with --rollout_replay, "
            "a folder with logprobs"
        )
    return correction.rollout_importance_sampling_mode is None
