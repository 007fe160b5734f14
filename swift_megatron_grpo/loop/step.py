"""One step of GRPO.

GRPOLoop.step
 |- StopRequest.raise_if_requested           on all ranks or on none
 |- queue of batches empty? _roll_out:
 |   |- Rollouts.take                        rollouts.py
 |   |   |- PromptSource.take                prompts of this rollout, unless it was started ahead
 |   |   |- WeightSync.to_engine             newest weights to an idle engine, then the check that it runs them
 |   |   |- GenerationEngine.generate        starts the generation; Generation.next returns groups as they finish
 |   |   |- engine sleeps, policy reloads    when the last group has arrived
 |   |   |- later rollouts start             with --max_staleness > 0
 |   |   |- call_reward_functions            group by group, then total_rewards
 |   |   '- resample                         --dynamic_sample: other prompts for groups of equal rewards
 |   |- subtract_kl                          with --kl_in_reward: policy and reference log-probs first
 |   |- add_advantages, CompletionLog.append
 |   |- LogprobCheck.check                   first rollout only
 |   |- RouterAgreement.measure               with --router_agreement_samples
 |   |- old log-probs                        of later steps: MegatronEngine.infer; of older weights: the engine's
 |   |- reference log-probs                  Reference.infer, if beta > 0 and KL is in the loss
 |   '- queue one batch per optimizer step
 |- pop one batch
 |- entropies, select_tokens                 with --top_entropy_quantile < 1
 |- MegatronEngine.train_step                forward, backward, update
 '- KlController.observe                     adaptive beta

The new weights are sent to the engine when the next rollout starts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from swift_megatron_grpo.data.images import image_digests
from swift_megatron_grpo.grading import add_advantages, reward_metrics, subtract_kl
from swift_megatron_grpo.loop.checks.expert_checks import check_reported
from swift_megatron_grpo.loop.kl_controller import KlController, divergences
from swift_megatron_grpo.loop.rollouts import Rollouts
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.samples import entropy_threshold, samples_of, select_tokens, without_routing
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
from swift_megatron_grpo.output.recording.unfinished import UnfinishedRollout, save_unfinished, shared_settings
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.losses import Correction
from swift_megatron_grpo.training.loss import effective_sample_size, make_loss, reads_entropy
from swift_megatron_grpo.training.passes import Output
from swift_megatron_grpo.types import Graded, Prompt, Rollout, Sample

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOTHING_TO_TRAIN = (
    "no completion of this step is trained, so its loss and gradient are 0: --overlong_filter (use a larger "
    "--max_completion_length) or --bad_reward drop has excluded all of them"
)


class GRPOLoop:
    """The steps of one run. Every rank calls every method."""

    def __init__(
        self,
        config: GRPOConfig,
        stages: Stages,
        trainer_state: Any,
        steps_done: int,
        total_steps: int,
        unfinished: UnfinishedRollout | None = None,
    ) -> None:
        self.config = config
        self.stages = stages
        self.kl_controller = KlController(config.loss.beta, config.kl)
        self._outputs: tuple[Output, ...] = ("logprob", "entropy") if reads_entropy(config.loss) else ("logprob",)
        self._weights_version = steps_done
        per_rollout = config.batch.steps_per_generation * config.num_iterations
        self._steps_to_skip = steps_done % per_rollout
        self._per_rollout = per_rollout
        self._unfinished = unfinished  # of the checkpoint, until its steps are queued
        self._current: UnfinishedRollout | None = None  # the rollout in training, for a checkpoint before its last step
        first = stages.prompts.taken // config.batch.rollout_prompts
        ahead = RunAhead(config.max_staleness, per_rollout, first, steps_done - self._steps_to_skip, total_steps)
        self._rollouts = Rollouts(config, stages, trainer_state, ahead)
        self._compared_with_engine = False
        self._batches: deque[list[Sample]] = deque()  # one per optimizer step left of the last rollout
        self._batches_in_training: list[list[Sample]] = []  # all of that rollout

    def step(self) -> dict[str, float]:
        """Run one optimizer step, after a rollout if the last one is used up. Return the metrics for the log."""
        with self.stages.trace.step(self._weights_version + 1):
            return self._step()

    def _step(self) -> dict[str, float]:
        step = self._begin_step()
        metrics, timer = step.metrics, step.timer
        if not self._batches:
            self._roll_out(step)
        samples = self._batches.popleft()
        if not any(any(sample.completion_mask) for sample in samples):
            logger.warning(_NOTHING_TO_TRAIN)
        if self.config.top_entropy_quantile < 1:
            with timer("entropies"):
                metrics |= self._select_tokens(samples)
        with timer("train"):
            self.stages.residency.for_training()
            loss = make_loss(replace(self.config.loss, beta=self.kl_controller.value))
            metrics |= effective_sample_size(self.stages.training.train_step(samples, loss, self._outputs))
        metrics["speed/train_tflop"] = self.stages.training.flops_of_last_step / 1e12
        self._weights_version += 1
        if self.kl_controller.adapts and not self.config.kl.in_reward:
            metrics["kl_beta"] = self.kl_controller.value
            self.kl_controller.observe(metrics["kl"], len(samples))
        return metrics | timer.seconds() | timer.memory()

    def roll_out(self) -> dict[str, float]:
        """Generate, grade and dump one rollout without training. Return the metrics for the log."""
        step = self._begin_step()
        graded = self._rollouts.take(step)
        graded = add_advantages(graded, self.config.grading.num_generations, self.config.grading)
        self.stages.log.append(graded)
        metrics = self._reward_metrics(graded, self.config.grading.num_generations)
        return step.metrics | metrics | step.timer.seconds()

    def evaluate(self, prompts: Sequence[Prompt]) -> tuple[list[Graded], dict[str, float]]:
        """Generate and grade completions of these prompts without training. Return them, and metrics of the phases.

        GPU memory stays as generation needed it.
        """
        step = self._begin_step()
        graded = self._rollouts.evaluate(prompts, self.config.evaluation, step)
        return graded, step.metrics | step.timer.seconds()

    def _begin_step(self) -> StepContext:
        self.stages.stop.raise_if_requested()
        return StepContext(self._weights_version, PhaseTimer(self._phase))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.stages.watchdog.phase(name), self.stages.trace.phase(name):
            yield

    def _roll_out(self, step: StepContext) -> None:
        """Fill the queue of batches with the samples of one rollout."""
        if self._unfinished is not None:
            self._continue(self._unfinished, step)
            return
        graded = self._graded_rollout(step)
        batches = self._batches_of(graded)
        self._compare_with_engine(batches[0], step.timer)
        self._measure_agreement(batches[0], graded, step)
        from_engine = old_logprobs_from_engine([g.rollout for g in graded], step.version, self.config.loss.correction)
        self._add_old_policy(batches, from_engine, step.timer)
        self._add_reference(batches, step.timer)
        self._queue(graded, batches, from_engine)

    def _continue(self, rest: UnfinishedRollout, step: StepContext) -> None:
        """Queue the steps that are left of a rollout that a checkpoint has interrupted, with its old log-probs."""
        self._rollouts.skip()
        batches = self._batches_of(rest.graded)
        for sample, old_logprobs in zip(chain.from_iterable(batches), rest.old_logprobs, strict=True):
            sample.old_logprobs = old_logprobs
        self._add_reference(batches, step.timer)
        self._queue(rest.graded, batches, rest.from_engine)
        self._unfinished = None

    def _batches_of(self, graded: Sequence[Graded]) -> list[list[Sample]]:
        """Return the samples of a rollout, in batches of one optimizer step."""
        size, grading = self.config.batch.global_batch_size, self.config.grading
        samples = samples_of(
            graded, grading.num_generations, grading.overlong_filter, self.stages.image_reader, self._replays_engine
        )
        return [samples[i : i + size] for i in range(0, len(samples), size)]

    def save(self, folder: str) -> None:
        """Write to a checkpoint what a resumed run needs beside the models: beta, and a rollout trained in part."""
        coordinator, current = self.stages.coordinator, self._current
        if self.kl_controller.adapts and coordinator.rank == 0:
            self.kl_controller.save(folder)
        if (
            current is None
            or self._weights_version % self._per_rollout == 0
            or self.config.routing.router_replay_mode == "R2"
        ):
            current = None  # with R2, each rank has the experts of its own layers
        else:
            samples = list(chain.from_iterable(self._batches_in_training))
            old = self._gather({i: s.old_logprobs for i, s in enumerate(samples) if s.old_logprobs is not None})
            current = replace(current, old_logprobs=[old.get(index) for index in range(len(samples))])
        if coordinator.rank == 0:
            save_unfinished(Path(folder), current, image_digests)

    def _graded_rollout(self, step: StepContext) -> list[Graded]:
        """Take the next rollout and compute its rewards, KL penalty and advantages."""
        grading = self.config.grading
        graded = self._rollouts.take(step)
        if self._replays_engine:
            check_reported([g.rollout for g in graded], self.stages.replay is not None)
        if self.config.kl.in_reward:
            graded = self._subtract_kl(graded, step)
        graded = add_advantages(graded, grading.num_generations, grading)
        self.stages.log.append(graded)
        step.metrics.update(self._reward_metrics(graded, grading.num_generations))
        return graded

    def _add_old_policy(self, batches: Sequence[list[Sample]], from_engine: bool, timer: PhaseTimer) -> None:
        later = batches if self.config.num_iterations > 1 else batches[1:]
        if self.config.routing.router_replay_mode == "R2":
            self._record_old_policy(later, timer)
        elif not from_engine:
            self._add_old_logprobs(later, timer)
        if from_engine:
            for sample in chain.from_iterable(batches):
                sample.old_logprobs = sample.rollout_logprobs

    def _add_reference(self, batches: Sequence[list[Sample]], timer: PhaseTimer) -> None:
        if self.stages.reference is None or self.config.kl.in_reward:
            return
        with timer("ref_logprobs"):
            self.stages.residency.for_reference()
            for samples in batches:
                for index, values in self.stages.reference.infer(without_routing(samples)).items():
                    samples[index].ref_logprobs = values.logprobs

    def _queue(self, graded: Sequence[Graded], batches: list[list[Sample]], from_engine: bool) -> None:
        """Queue one batch for each optimizer step that this rollout feeds.

        The first step trains the old policy itself, unless older weights generated, so it computes the old log-probs
        itself. In every later step the policy has moved.
        """
        first = batches[0] if from_engine else [replace(sample, old_logprobs=None) for sample in batches[0]]
        steps = [first, *batches[1:], *batches * (self.config.num_iterations - 1)]
        self._batches.extend(steps[self._steps_to_skip :])
        self._steps_to_skip = 0  # the steps of this rollout that a resumed run had done
        settings = shared_settings(self.config)
        self._current = UnfinishedRollout(self._rollouts.last, settings, graded, [], from_engine)
        self._batches_in_training = batches

    def _add_old_logprobs(self, batches: Sequence[list[Sample]], timer: PhaseTimer) -> None:
        for samples in batches:
            with timer("old_logprobs"):
                for index, values in self.stages.training.infer(samples).items():
                    samples[index].old_logprobs = values.logprobs

    def _record_old_policy(self, batches: Sequence[list[Sample]], timer: PhaseTimer) -> None:
        """Add old log-probs, and the experts of the same pass, which later steps replay.

        The first step needs neither: it trains the policy that would be recorded.
        """
        for samples in batches:
            with timer("old_logprobs"):
                values, experts = self.stages.training.infer_and_record(samples)
                for index, value in values.items():
                    samples[index].old_logprobs = value.logprobs
                for index, rows in experts.items():
                    samples[index].routed_experts = rows

    @property
    def _replays_engine(self) -> bool:
        return self.config.routing.router_replay_mode == "R3"

    def _measure_agreement(self, samples: Sequence[Sample], graded: Sequence[Graded], step: StepContext) -> None:
        """Compare the experts that trainer and engine choose for some completions of this rollout."""
        if self.stages.router_agreement is None:
            return
        with step.timer("router_agreement"):
            engine = [g.rollout.routed_experts for g in graded[: len(samples)]]
            share = self.stages.router_agreement.measure(samples, engine)
        if share is not None:
            step.metrics["rollout/router_agreement"] = share

    def _subtract_kl(self, graded: list[Graded], step: StepContext) -> list[Graded]:
        """Return completions with reward - beta KL.

        Log-probs exist on the last pipeline stage, rewards on every rank: sums are exchanged over gloo.
        """
        assert self.stages.reference is not None
        samples = samples_of(graded, len(graded), False, self.stages.image_reader, self._replays_engine)
        with step.timer("kl_in_reward"):
            policy = self.stages.training.infer(samples)
            self.stages.residency.for_reference()
            reference = self.stages.reference.infer(without_routing(samples))
            gathered = self._gather(divergences(policy, reference, self.config.kl.kl_estimator or "k1"))
        penalties = [gathered[i] for i in range(len(samples))]
        tokens = sum(sum(sample.completion_mask) for sample in samples)
        per_token = sum(penalties) / max(tokens, 1)
        step.metrics.update(kl=sum(penalties) / len(penalties), kl_per_token=per_token)
        penalised = subtract_kl(graded, penalties, self.kl_controller.value)
        if self.kl_controller.adapts:
            step.metrics["kl_beta"] = self.kl_controller.value
            self.kl_controller.observe(per_token, len(samples))
        return penalised

    def _select_tokens(self, samples: list[Sample]) -> dict[str, float]:
        values = self.stages.training.infer(samples, ("logprob", "entropy"))
        gathered = self._gather({i: np.asarray(sample.entropies, np.float32) for i, sample in values.items()})
        threshold = entropy_threshold(gathered.values(), self.config.top_entropy_quantile)
        for index, entropies in gathered.items():
            select_tokens(samples[index], entropies, threshold)
        return {"entropy/entropy_threshold": threshold}

    def _gather(self, values: dict[int, T]) -> dict[int, T]:
        return self.stages.coordinator.gather_samples(values, self.stages.training.parallel)

    def _compare_with_engine(self, samples: Sequence[Sample], timer: PhaseTimer) -> None:
        """Compare the engine's log-probs with the trainer's, once in a run."""
        rounding = None if self.stages.sync is None else self.stages.sync.rounding
        if rounding is not None and not self._compared_with_engine:
            with timer("sync_check"):
                self.stages.logprob_check.check(samples, rounding)
        self._compared_with_engine = True

    def _reward_metrics(self, graded: list[Graded], num_generations: int) -> dict[str, float]:
        grading = self.config.grading
        return reward_metrics(graded, self.stages.rewards.names, num_generations, grading.scale_rewards)


def old_logprobs_from_engine(rollouts: Sequence[Rollout], version: int, correction: Correction) -> bool:
    """Return True if the engine's log-probs are the old log-probs, instead of the trainer's own.

    True for completions of older weights without a rollout correction: the ratio and its clipping then account for how
    far the policy has moved since. A rollout correction would weight the completions by that.
    """
    if all(rollout.weights_version == version for rollout in rollouts):
        return False
    if any(rollout.logprobs is None for rollout in rollouts):
        raise RuntimeError(
            f"completions of other weights than the trainer's ({version}) came without the engine's log-probs, which "
            "alone measure how far the policy has moved since; use --async_generate false or, with --rollout_replay, "
            "a folder with logprobs"
        )
    return correction.rollout_importance_sampling_mode is None
