"""One step of GRPO, as prose:

prompts -> generation -> grading -> (other prompts for groups that teach nothing) -> advantages -> samples -> (old and
reference log-probs, where they are needed) -> Megatron forward, backward and update. The new weights travel to the
engine when it generates next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from swift_megatron_grpo.completion_log import CompletionLog
from swift_megatron_grpo.config import GRPOConfig
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.engine import (
    AdapterConfig,
    GenerationEngine,
    NamedWeights,
    Request,
    Share,
    requests_for,
)
from swift_megatron_grpo.grading import RewardFunctions, compare, grade, penalise, resample, reward_metrics, score
from swift_megatron_grpo.kl_control import Beta, divergences
from swift_megatron_grpo.metrics import PhaseTimer
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.selection import entropy_threshold, select_tokens
from swift_megatron_grpo.training.engine import MegatronEngine, Output
from swift_megatron_grpo.training.loss import effective_sample_size, make_loss, reads_entropy
from swift_megatron_grpo.training.reference import Reference
from swift_megatron_grpo.training.residency import Residency
from swift_megatron_grpo.types import Graded, Prompt, Rollout, Sample

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOTHING_TO_TRAIN = (
    "no completion of this step is trained, so its loss and gradient are 0: --overlong_filter (use a larger "
    "--max_completion_length) or --bad_reward drop has left out all of them"
)


@dataclass(frozen=True)
class Parts:
    """The stages of one run, built."""

    prompts: PromptSource
    spare_prompts: PromptSource  # for --dynamic_sample, in another order
    generation: GenerationEngine
    rewards: RewardFunctions
    training: MegatronEngine
    reference: Reference | None
    residency: Residency
    export_weights: Callable[[], NamedWeights]  # the trained ones, under the checkpoint's names; all ranks together
    adapter: AdapterConfig | None  # of those, if they are an adapter that the engine runs beside the checkpoint
    coordinator: Coordinator
    log: CompletionLog


class GRPOLoop:
    def __init__(self, config: GRPOConfig, parts: Parts, trainer_state: Any, steps_done: int = 0) -> None:
        self.config = config
        self.parts = parts
        self._trainer_state = trainer_state  # reward functions may read it
        self.beta = Beta(config.loss.beta, config.kl)
        self._outputs: tuple[Output, ...] = ("logprob", "entropy") if reads_entropy(config.loss) else ("logprob",)
        self._weights_version = steps_done
        self._steps_to_skip = steps_done % (config.batch.steps_per_generation * config.num_iterations)
        self._batches: deque[list[Sample]] = deque()  # one for each optimizer step that the last rollout still feeds

    def step(self) -> dict[str, float]:
        """One optimizer step; a rollout first, when the last one is used up."""
        timer = PhaseTimer()
        metrics: dict[str, float] = {}
        if not self._batches:
            metrics |= self._roll_out(timer)
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

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> dict[str, float]:
        """Rewards of fresh completions of these prompts; nothing is trained. Leaves the GPU as generation needed it."""
        timer = PhaseTimer()
        graded = self._generate_and_grade(prompts, num_generations, timer)
        graded = compare(graded, num_generations, self.config.grading)
        return self._reward_metrics(graded, num_generations) | timer.seconds()

    def _roll_out(self, timer: PhaseTimer) -> dict[str, float]:
        """Fills the queue of batches with the samples of one generation."""
        batch, grading = self.config.batch, self.config.grading
        metrics: dict[str, float] = {}
        prompts = self.parts.prompts.take(batch.rollout_prompts)
        graded = self._generate_and_grade(prompts, grading.num_generations, timer)
        if grading.max_resample_times:
            graded = self._replace_uniform_groups(graded, metrics, timer)
        if self.config.kl.in_reward:
            graded = self._penalise(graded, metrics, timer)
        graded = compare(graded, grading.num_generations, grading)
        self.parts.log.append(self._weights_version, graded)

        samples = [_to_sample(g, i // grading.num_generations, grading.overlong_filter) for i, g in enumerate(graded)]
        batches = [samples[i : i + batch.global_batch_size] for i in range(0, len(samples), batch.global_batch_size)]
        # The first step after a rollout trains the very policy that generated: its old log-probs are its own. The
        # policy of every later step has moved.
        for later in batches if self.config.num_iterations > 1 else batches[1:]:
            with timer("old_logprobs"):
                for index, values in self.parts.training.infer(later).items():
                    later[index].old_logprobs = values.logprobs
        if self.parts.reference is not None and not self.config.kl.in_reward:
            with timer("ref_logprobs"):
                self.parts.residency.for_reference()
                for each in batches:
                    for index, values in self.parts.reference.infer(each).items():
                        each[index].ref_logprobs = values.logprobs
        on_policy = [replace(sample, old_logprobs=None) for sample in batches[0]]
        steps = [on_policy, *batches[1:], *batches * (self.config.num_iterations - 1)]
        self._batches.extend(steps[self._steps_to_skip :])
        self._steps_to_skip = 0  # steps that a resumed run has done
        return metrics | self._reward_metrics(graded, grading.num_generations)

    def _replace_uniform_groups(
        self, graded: list[Graded], metrics: dict[str, float], timer: PhaseTimer
    ) -> list[Graded]:
        grading, per_rollout = self.config.grading, self.config.batch.rollout_prompts
        # Where the spare prompts go on depends on the number of rollouts only, so a resumed run draws the same ones.
        rollouts = self.parts.prompts.taken // per_rollout
        self.parts.spare_prompts.taken = rollouts * grading.max_resample_times * per_rollout

        def draw(groups: int) -> list[Graded]:
            prompts = self.parts.spare_prompts.take(groups)
            return self._generate_and_grade(prompts, grading.num_generations, timer)

        found = resample(graded, grading.num_generations, grading.max_resample_times, draw)
        if found.uniform:
            logger.warning(
                f"{found.uniform} of {per_rollout} groups have equal rewards after --max_resample_times "
                f"{grading.max_resample_times} rounds; they stay in the batch, with advantages of 0"
            )
        metrics |= found.metrics()
        return found.graded

    def _penalise(self, graded: list[Graded], metrics: dict[str, float], timer: PhaseTimer) -> list[Graded]:
        """reward - beta KL. Log-probs exist on the last pipeline stage, rewards everywhere: sums go over gloo."""
        assert self.parts.reference is not None
        samples = [_to_sample(each, group=0, overlong_filter=False) for each in graded]
        with timer("kl_in_reward"):
            policy = self.parts.training.infer(samples)
            self.parts.residency.for_reference()
            reference = self.parts.reference.infer(samples)
            told = self._of_all_ranks(divergences(policy, reference, self.config.kl.reward_estimator))
        penalties = [told[i] for i in range(len(samples))]
        tokens = sum(sum(sample.completion_mask) for sample in samples)
        metrics |= {"kl": sum(penalties) / len(penalties), "kl_per_token": sum(penalties) / max(tokens, 1)}
        penalised = penalise(graded, penalties, self.beta.value)
        if self.beta.adapts:
            metrics["kl_beta"] = self.beta.value
            self.beta.observe(metrics["kl_per_token"], len(samples))
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

    def _generate_and_grade(self, prompts: Sequence[Prompt], num_generations: int, timer: PhaseTimer) -> list[Graded]:
        requests = requests_for(prompts, num_generations, self.config.sampling.seed, self._weights_version)
        rollouts: dict[int, Rollout] = {}
        rewards: dict[int, list[float | None]] = {}
        for groups in self._generate(requests, num_generations, timer):
            with timer("grading"):
                rewards |= zip(groups, self._score(list(groups.values()), num_generations), strict=True)
            rollouts |= groups
        order = range(len(requests))
        return grade([rollouts[i] for i in order], [rewards[i] for i in order], self.config.grading)

    def _generate(self, requests: Sequence[Request], unit: int, timer: PhaseTimer) -> Iterator[dict[int, Rollout]]:
        """The newest weights to the engine, then one completion for each request, on every rank: whole groups, as they
        are complete. The engine sleeps when the last ones are told."""
        engine, residency = self.parts.generation, self.parts.residency
        with timer("phase_switch"):
            residency.make_room(engine.memory_to_wake)
            engine.wake_weights()
        self._sync_weights(timer)
        with timer("phase_switch"):
            residency.for_generation()
            engine.wake_cache()
        generation = engine.generate(engine.share.pick(requests), unit, self.config.sampling)
        missing = len(requests)
        while missing:
            with timer("generation"):
                told = self.parts.coordinator.all_gather_or_raise(generation.next, "generating completions")
            if any(news.lacks_weights for news in told):  # a server was started anew
                self._sync_weights(timer)
            finished = {index: rollout for news in told for index, rollout in news.finished.items()}
            missing -= len(finished)
            if not missing:
                with timer("phase_switch"):
                    engine.sleep()
                    residency.for_inference()  # the policy comes back while rewards are computed
            if finished:
                yield finished

    def _sync_weights(self, timer: PhaseTimer) -> None:
        """Exporting takes all ranks, so all of them learn that an engine lacks the newest weights."""
        engine, version = self.parts.generation, self._weights_version
        with timer("weight_sync"):
            while any(
                self.parts.coordinator.all_gather_or_raise(lambda: engine.lacks(version), "reaching the engines")
            ):
                self.parts.residency.for_weight_sync()
                engine.load_weights(self.parts.export_weights(), version, self.parts.adapter)

    def _score(self, rollouts: list[Rollout], num_generations: int) -> list[list[float | None]]:
        """Every rank grades some groups, whole ones, and tells the others."""
        groups = [rollouts[i : i + num_generations] for i in range(0, len(rollouts), num_generations)]
        coordinator = self.parts.coordinator
        share = Share(coordinator.rank, coordinator.world_size, speaks=True)
        mine = [rollout for group in share.pick(groups) for rollout in group]
        parts = coordinator.all_gather_or_raise(
            lambda: score(mine, self.parts.rewards, self._trainer_state) if mine else [], "grading"
        )
        return [row for part in parts for row in part]

    def _reward_metrics(self, graded: list[Graded], num_generations: int) -> dict[str, float]:
        grading = self.config.grading
        return reward_metrics(graded, self.parts.rewards.names, num_generations, grading.scale_rewards)


def _to_sample(graded: Graded, group: int, overlong_filter: bool) -> Sample:
    rollout = graded.rollout
    valid = graded.reward is not None
    too_long = valid and overlong_filter and rollout.truncated
    trained = valid and not too_long
    return Sample(
        tokens=rollout.prompt_ids + rollout.completion_ids,
        completion_mask=[False] * len(rollout.prompt_ids) + [trained] * len(rollout.completion_ids),
        advantage=graded.advantage,
        group=group,
        truncated=rollout.truncated,
        rollout_logprobs=(rollout.logprobs if trained else []) if rollout.logprobs is not None else None,
        left_out=len(rollout.completion_ids) if too_long else 0,
    )
