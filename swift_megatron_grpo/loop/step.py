"""One step of GRPO.

GRPOLoop.train_step
 |- StopRequest.raise_if_requested           on all ranks or on none
 |- no batch left? _roll_out:
 |   |- Rollouts.take                        rollouts.py
 |   |   |- RolloutQueue.take                rollout_queue.py: prompts of this rollout, unless it was started ahead
 |   |   |   |- WeightSync.to_engine         newest weights to an idle engine, then the check that it runs them
 |   |   |   '- GenerationEngine.generate    starts the generation
 |   |   |- RolloutQueue.collect             returns groups as they finish
 |   |   |   |- engine sleeps, policy reloads    when the last group has arrived
 |   |   |   '- later rollouts start         with --max_staleness > 0
 |   |   |- reward functions                 of each group, distributed over the ranks; then total_rewards
 |   |   '- resample                         --dynamic_sample: other prompts for groups of equal rewards
 |   |- subtract_kl                          with --kl_in_reward: policy and reference log-probs first
 |   |- add_advantages, CompletionLog.append
 |   '- TrainingBatches.fill                 training_batches.py: one batch per optimizer step
 |       |- LogprobCheck.check               first rollout, or all with predicted drafts
 |       |- RouterAgreement.measure          with --router_agreement_samples
 |       |- old log-probs                    of later steps: MegatronEngine.infer; of older weights: the engine's
 |       |- baselines of tokens              with --advantage_estimator optimal_token_baseline
 |       |- log-ratios of a teacher          Reference.infer of the teacher, with --teacher_model
 |       '- reference log-probs              Reference.infer, if beta > 0 and KL is in the loss
 |- TrainingBatches.next
 |- select_tokens, mask_tokens               with --top_entropy_quantile < 1, with --m2_threshold
 |- AnswerSource.of_step                     with --chord_sft_dataset
 |- MegatronEngine.train_step                forward, backward, update
 '- KlController.observe                     adaptive beta

The new weights are sent to the engine when the next rollout starts.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from swift_megatron_grpo.data.image_reader import media_digests
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.metrics import outcome_metrics
from swift_megatron_grpo.grading.results import add_advantages, subtract_kl
from swift_megatron_grpo.loop.checks.experts import check_reported
from swift_megatron_grpo.loop.checks.sequences import check_sequences
from swift_megatron_grpo.loop.rollouts import Rollouts
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.samples import (
    entropy_threshold,
    mask_tokens,
    samples_of,
    select_tokens,
    squared_log_ratios,
    without_routing,
)
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
from swift_megatron_grpo.loop.training_batches import TrainingBatches
from swift_megatron_grpo.output.recording.unfinished import UnfinishedRollout, save_unfinished
from swift_megatron_grpo.packing.bins import sums
from swift_megatron_grpo.packing.collate import num_completions
from swift_megatron_grpo.packing.outlines import Outline
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss import effective_sample_size, make_loss, reads_entropy, with_answers
from swift_megatron_grpo.training.loss.correction import second_moment_limit
from swift_megatron_grpo.training.loss.kl import KlController, divergences
from swift_megatron_grpo.training.passes import Output
from swift_megatron_grpo.types import Prompt, Sample

logger = logging.getLogger(__name__)


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
        self.kl_controller = KlController(config.loss.kl_weight, config.kl)
        self._outputs: tuple[Output, ...] = ("logprob", "entropy") if reads_entropy(config.loss) else ("logprob",)
        self._weights_version = steps_done
        self._batches = TrainingBatches(config, stages, steps_done)
        self._unfinished = unfinished  # of the checkpoint, until its steps are queued
        ahead = RunAhead(
            max_staleness=config.max_staleness,
            steps_per_rollout=self._batches.steps_per_rollout,
            first_rollout=stages.prompts.taken // config.batch.rollout_prompts,
            first_version=steps_done - self._batches.steps_to_skip,
            total_steps=total_steps,
        )
        self._rollouts = Rollouts(config, stages, trainer_state, ahead)

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step, after a rollout if the last one is used up. Return the metrics for the log."""
        with self.stages.trace.step(self._weights_version + 1):
            step = self._begin_step()
            if self._batches.is_empty:
                self._roll_out(step)
            self._update(self._batches.next(), step)
            return step.metrics | step.timer.seconds() | step.timer.memory()

    def generate_only(self) -> dict[str, float]:
        """Generate, grade and dump one rollout without training. Return the metrics for the log."""
        step = self._begin_step()
        self._finish_grading(self._rollouts.take(step), step)
        return step.metrics | step.timer.seconds()

    def evaluate(self, prompts: Sequence[Prompt]) -> tuple[GradedRollouts, dict[str, float]]:
        """Generate and grade completions without training. GPU memory stays as generation needed it."""
        step = self._begin_step()
        graded = self._rollouts.evaluate(prompts, self.config.evaluation, step)
        return graded, step.metrics | step.timer.seconds()

    def save(self, folder: str) -> None:
        """Write to a checkpoint what a resumed run needs besides the models: beta, and a rollout trained in part."""
        unfinished = self._batches.unfinished(self._weights_version)
        if self.stages.coordinator.rank == 0:
            self.kl_controller.save(folder)
            save_unfinished(Path(folder), unfinished, media_digests)
        if self.stages.moving_reference is not None:
            self.stages.moving_reference.save(folder)

    # ---- a step

    def _begin_step(self) -> StepContext:
        self.stages.stop.raise_if_requested()
        return StepContext(self._weights_version, PhaseTimer(self._phase))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.stages.watchdog.phase(name), self.stages.trace.phase(name):
            yield

    def _roll_out(self, step: StepContext) -> None:
        """Fill the batches with the next rollout, or with the rest of the one that the checkpoint interrupted."""
        if self._unfinished is not None:
            functions = len(self.config.grading.reward_names)
            check_sequences(GradedRollouts.of(self._unfinished.graded, functions), self.config)
            self._rollouts.skip()
            self._batches.resume(self._unfinished, step)
            self._unfinished = None
            return
        graded = self._rollouts.take(step)
        check_sequences(graded, self.config)
        if self.config.routing.router_replay_mode == "R3":
            check_reported(graded.rollouts, self.stages.replay is not None)
        if self.config.kl.kl_in_reward and self.stages.reference is not None:  # with --beta 0 there is none
            graded = self._subtract_kl(graded, step)
        graded = self._finish_grading(graded, step)
        self._batches.fill(self._rollouts.last, graded, step)

    def _finish_grading(self, graded: GradedRollouts, step: StepContext) -> GradedRollouts:
        """Add advantages, and log completions and rewards."""
        grading = self.config.grading
        result = add_advantages(graded, grading)
        log, bodies = self.stages.log, self.stages.bodies
        if bodies is not None and log.config.log_completions:
            log.append(bodies.whole_on(self.stages.coordinator.world_size - 1, result))
        else:
            log.append(result)
        step.metrics.update(
            outcome_metrics(result.outcomes, self.stages.rewards.names, grading.num_generations, grading.scale_rewards)
        )
        return result

    def _update(self, samples: Sequence[Sample], step: StepContext) -> None:
        training = self.stages.training
        if not Outline.of(samples).trained.any():
            logger.warning(
                "no completion of this step is trained, so its loss and gradient are 0: --overlong_filter (use a "
                "larger --max_completion_length) or --bad_reward drop has excluded all of them"
            )
        by_entropy = self.config.top_entropy_quantile < 1
        if by_entropy or self.config.loss.correction.m2_threshold is not None:
            with step.timer("entropies" if by_entropy else "log_ratios"):
                self._select_tokens(samples, step)
        with step.timer("train"):
            self.stages.residency.for_training()
            loss = make_loss(self._loss_of_step(step))
            answers: list[Sample] = []
            if self.stages.answers is not None:
                step.metrics["chord/mu"] = mu = self.config.chord.mu(self._weights_version)
                loss = with_answers(loss, mu, self.config.chord.chord_enable_phi_function)
                answers = self.stages.answers.of_step(self._weights_version) if mu > 0 else []
            metrics = training.train_step([*samples, *answers] if answers else samples, loss, self._outputs)
            step.metrics.update(effective_sample_size(metrics))
        step.metrics["speed/train_tflop"] = training.flops_of_last_step / 1e12
        self._weights_version += 1
        if self.stages.moving_reference is not None:
            self.stages.moving_reference.after_step(self._weights_version)
        if self.kl_controller.adapts and not self.config.kl.kl_in_reward:
            self._adapt_beta(step.metrics["kl"], num_completions(samples), step)

    def _loss_of_step(self, step: StepContext) -> LossConfig:
        """Return the loss with its weights that change from step to step: beta, and RLSD's from rollout to rollout."""
        loss, rlsd = replace(self.config.loss, beta=self.kl_controller.value), self.config.loss.rlsd
        if not rlsd.is_on:
            return loss
        share = rlsd.share(self._weights_version - self._weights_version % self._batches.steps_per_rollout)
        step.metrics["rlsd_lambda"] = share
        return replace(loss, rlsd=replace(rlsd, rlsd_lambda=share))

    def _subtract_kl(self, graded: GradedRollouts, step: StepContext) -> GradedRollouts:
        """Return completions with reward - beta KL. Log-probs exist on the last pipeline stage, rewards everywhere."""
        stages = self.stages
        replays_engine = self.config.routing.router_replay_mode == "R3"
        assert stages.reference is not None
        samples = samples_of(graded, len(graded), False, stages.image_reader, replays_engine)
        with step.timer("kl_in_reward"):
            policy = stages.training.infer(samples)
            stages.residency.for_reference()
            reference = stages.reference.infer(without_routing(samples))
            of_rank = divergences(policy, reference, self.config.kl.kl_estimator or "k1")
            gathered = stages.coordinator.gather_samples(of_rank, stages.training.parallel)
        outline = Outline.of(samples)
        of_samples = np.array([gathered[index] for index in range(len(samples))])
        penalties = sums(outline.completions, of_samples, len(graded))
        total = math.fsum(penalties.tolist())
        per_token = total / max(int(outline.trained.sum()), 1)
        counted = int(graded.outcomes.rewards.valid.sum())  # a dropped one has a penalty of 0
        step.metrics.update(kl=total / max(counted, 1), kl_per_token=per_token)
        penalised = subtract_kl(graded, penalties, self.kl_controller.value)
        self._adapt_beta(per_token, len(graded), step)
        return penalised

    def _adapt_beta(self, kl_per_token: float, completions: int, step: StepContext) -> None:
        if self.kl_controller.adapts:
            step.metrics["kl_beta"] = self.kl_controller.value
            self.kl_controller.observe(kl_per_token, completions)

    def _select_tokens(self, samples: Sequence[Sample], step: StepContext) -> None:
        """Exclude tokens from the policy loss, by values of all tokens of the step."""
        training, gather = self.stages.training, self.stages.coordinator.gather_samples
        quantile, second_moment = self.config.top_entropy_quantile, self.config.loss.correction.m2_threshold
        values = training.infer(samples, ("logprob", "entropy") if quantile < 1 else ("logprob",))
        for sample in samples:
            sample.selected = None
        if quantile < 1:
            of_rank = {index: np.asarray(value.entropies, np.float32) for index, value in values.items()}
            gathered = gather(of_rank, training.parallel)
            threshold = entropy_threshold(gathered.values(), quantile)
            for index, entropies in gathered.items():
                select_tokens(samples[index], entropies, threshold)
            step.metrics["entropy/entropy_threshold"] = threshold
        if second_moment is not None:
            of_rank = {index: squared_log_ratios(samples[index], value.logprobs) for index, value in values.items()}
            gathered = gather(of_rank, training.parallel)
            limit = second_moment_limit(gathered.values(), second_moment)
            for index, squares in gathered.items():
                mask_tokens(samples[index], squares, limit)
            every = np.concatenate(list(gathered.values()))
            step.metrics["m2/second_moment"] = float(every.mean()) if every.size else 0.0
            step.metrics["m2/masked_frac"] = float((every >= limit).mean()) if every.size else 0.0
