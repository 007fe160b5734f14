"""One step of GRPO, as prose:

graded completions (rollouts.py) -> advantages -> samples -> (old and reference log-probs, where they are needed) ->
Megatron forward, backward and update. The new weights travel to the engine when it generates next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from swift_megatron_grpo.config import CorrectionConfig, GRPOConfig
from swift_megatron_grpo.grading import compare, penalise, reward_metrics
from swift_megatron_grpo.loop.kl_controller import Beta, divergences
from swift_megatron_grpo.loop.phase_timer import PhaseTimer
from swift_megatron_grpo.loop.rollouts import Rollouts, Step
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.stages import Parts
from swift_megatron_grpo.loop.token_selection import entropy_threshold, select_tokens
from swift_megatron_grpo.training.engine import Output
from swift_megatron_grpo.training.loss import effective_sample_size, make_loss, reads_entropy
from swift_megatron_grpo.types import Graded, Prompt, Rollout, Sample

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOTHING_TO_TRAIN = (
    "no completion of this step is trained, so its loss and gradient are 0: --overlong_filter (use a larger "
    "--max_completion_length) or --bad_reward drop has left out all of them"
)


class GRPOLoop:
    def __init__(
        self, config: GRPOConfig, parts: Parts, trainer_state: Any, steps_done: int, steps_in_all: int
    ) -> None:
        self.config = config
        self.parts = parts
        self.beta = Beta(config.loss.beta, config.kl)
        self._outputs: tuple[Output, ...] = ("logprob", "entropy") if reads_entropy(config.loss) else ("logprob",)
        self._weights_version = steps_done
        per_rollout = config.batch.steps_per_generation * config.num_iterations
        self._steps_to_skip = steps_done % per_rollout
        first = parts.prompts.taken // config.batch.rollout_prompts
        ahead = RunAhead(config.max_staleness, per_rollout, first, steps_done - self._steps_to_skip, steps_in_all)
        self._rollouts = Rollouts(config, parts, trainer_state, ahead)
        self._compared_with_engine = False
        self._batches: deque[list[Sample]] = deque()  # one for each optimizer step that the last rollout still feeds

    def step(self) -> dict[str, float]:
        """One optimizer step; a rollout first, when the last one is used up."""
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
            self.parts.residency.for_training()
            loss = make_loss(replace(self.config.loss, beta=self.beta.value))
            metrics |= effective_sample_size(self.parts.training.train_step(samples, loss, self._outputs))
        self._weights_version += 1
        if self.beta.adapts and not self.config.kl.in_reward:
            metrics["kl_beta"] = self.beta.value
            self.beta.observe(metrics["kl"], len(samples))
        return metrics | timer.seconds()

    def roll_out(self) -> dict[str, float]:
        """A rollout, graded and dumped; nothing is trained."""
        step = self._begin_step()
        graded = self._rollouts.take(step)
        graded = compare(graded, self.config.grading.num_generations, self.config.grading)
        self.parts.log.append(graded)
        return self._summary(step, graded, self.config.grading.num_generations)

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> dict[str, float]:
        """Rewards of fresh completions of these prompts; nothing is trained. Leaves the GPU as generation needed it."""
        step = self._begin_step()
        graded = self._rollouts.evaluate(prompts, num_generations, step)
        graded = compare(graded, num_generations, self.config.grading)
        return self._summary(step, graded, num_generations)

    def _begin_step(self) -> Step:
        return Step(self._weights_version, PhaseTimer(self.parts.watchdog.phase))

    def _summary(self, step: Step, graded: list[Graded], num_generations: int) -> dict[str, float]:
        return step.metrics | self._reward_metrics(graded, num_generations) | step.timer.seconds()

    def _roll_out(self, step: Step) -> None:
        """Fills the queue of batches with the samples of one rollout."""
        size, grading = self.config.batch.global_batch_size, self.config.grading
        graded = self._rollouts.take(step)
        if self.config.kl.in_reward:
            graded = self._penalise(graded, step)
        graded = compare(graded, grading.num_generations, grading)
        self.parts.log.append(graded)

        samples = [_to_sample(g, i // grading.num_generations, grading.overlong_filter) for i, g in enumerate(graded)]
        batches = [samples[i : i + size] for i in range(0, len(samples), size)]
        self._compare_with_engine(batches[0], step.timer)
        iterations = self.config.num_iterations
        engine_is_old = old_policy_is_engines([g.rollout for g in graded], step.version, self.config.loss.correction)
        if engine_is_old:
            for sample in samples:
                sample.old_logprobs = sample.rollout_logprobs
        else:
            self._add_old_logprobs(batches if iterations > 1 else batches[1:], step.timer)
        if self.parts.reference is not None and not self.config.kl.in_reward:
            with step.timer("ref_logprobs"):
                self.parts.residency.for_reference()
                for each in batches:
                    for index, values in self.parts.reference.infer(each).items():
                        each[index].ref_logprobs = values.logprobs
        # The first step trains the old policy itself, unless that is an older one: its old log-probs are its own. The
        # policy of every later step has moved.
        first = batches[0] if engine_is_old else [replace(sample, old_logprobs=None) for sample in batches[0]]
        steps = [first, *batches[1:], *batches * (iterations - 1)]
        self._batches.extend(steps[self._steps_to_skip :])
        self._steps_to_skip = 0  # steps that a resumed run has done
        step.metrics.update(self._reward_metrics(graded, grading.num_generations))

    def _add_old_logprobs(self, batches: Sequence[list[Sample]], timer: PhaseTimer) -> None:
        for samples in batches:
            with timer("old_logprobs"):
                for index, values in self.parts.training.infer(samples).items():
                    samples[index].old_logprobs = values.logprobs

    def _penalise(self, graded: list[Graded], step: Step) -> list[Graded]:
        """reward - beta KL. Log-probs exist on the last pipeline stage, rewards everywhere: sums go over gloo."""
        assert self.parts.reference is not None
        samples = [_to_sample(each, group=0, overlong_filter=False) for each in graded]
        with step.timer("kl_in_reward"):
            policy = self.parts.training.infer(samples)
            self.parts.residency.for_reference()
            reference = self.parts.reference.infer(samples)
            told = self._of_all_ranks(divergences(policy, reference, self.config.kl.reward_estimator))
        penalties = [told[i] for i in range(len(samples))]
        tokens = sum(sum(sample.completion_mask) for sample in samples)
        per_token = sum(penalties) / max(tokens, 1)
        step.metrics.update(kl=sum(penalties) / len(penalties), kl_per_token=per_token)
        penalised = penalise(graded, penalties, self.beta.value)
        if self.beta.adapts:
            step.metrics["kl_beta"] = self.beta.value
            self.beta.observe(per_token, len(samples))
        return penalised

    def _select_tokens(self, samples: list[Sample]) -> dict[str, float]:
        values = self.parts.training.infer(samples, ("logprob", "entropy"))
        told = self._of_all_ranks({i: np.asarray(each.entropies, np.float32) for i, each in values.items()})
        threshold = entropy_threshold(told.values(), self.config.top_entropy_quantile)
        for index, entropies in told.items():
            select_tokens(samples[index], entropies, threshold)
        return {"entropy/entropy_threshold": threshold}

    def _of_all_ranks(self, values: dict[int, T]) -> dict[int, T]:
        return self.parts.coordinator.gather_samples(values, self.parts.training.parallel)

    def _compare_with_engine(self, samples: Sequence[Sample], timer: PhaseTimer) -> None:
        """Once in a run."""
        rounding = None if self.parts.sync is None else self.parts.sync.rounding
        if rounding is not None and not self._compared_with_engine:
            with timer("sync_check"):
                self.parts.first_rollout.check(samples, rounding)
        self._compared_with_engine = True

    def _reward_metrics(self, graded: list[Graded], num_generations: int) -> dict[str, float]:
        grading = self.config.grading
        return reward_metrics(graded, self.parts.rewards.names, num_generations, grading.scale_rewards)


def old_policy_is_engines(rollouts: Sequence[Rollout], version: int, correction: CorrectionConfig) -> bool:
    """Whether old log-probs are those that the engine told, not the trainer's own. Where older weights generated, and
    a rollout correction does not weigh completions by how far the policy has moved since, ratio and clipping do."""
    if all(rollout.weights_version == version for rollout in rollouts):
        return False
    if any(rollout.logprobs is None for rollout in rollouts):
        raise RuntimeError(
            f"completions of other weights than the trainer's ({version}) came without the engine's log-probs, and "
            "nothing else tells how far the policy has moved since; use --async_generate false, or where they are "
            "replayed (--rollout_replay) a folder with logprobs"
        )
    return correction.mode is None


def _to_sample(graded: Graded, group: int, overlong_filter: bool) -> Sample:
    rollout = graded.rollout
    valid = graded.reward is not None
    too_long = valid and overlong_filter and rollout.truncated
    trained = valid and not too_long
    return Sample(
        tokens=rollout.prompt_ids + rollout.completion_ids,
        completion_mask=[False] * len(rollout.prompt_ids) + [trained and mine for mine in rollout.sampled_mask],
        advantage=graded.advantage,
        group=group,
        truncated=rollout.truncated,
        rollout_logprobs=(rollout.logprobs if trained else []) if rollout.logprobs is not None else None,
        left_out=rollout.length if too_long else 0,
    )
