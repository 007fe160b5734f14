"""One step of GRPO, as prose:

prompts -> generation -> grading -> advantages -> samples -> (old and reference log-probs, where they are needed)
-> Megatron forward, backward and update. The new weights travel to the engine when it generates next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_megatron_grpo.completion_log import CompletionLog
from swift_megatron_grpo.config import GRPOConfig
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.engine import GenerationEngine, NamedWeights, Share
from swift_megatron_grpo.grading import RewardFunctions, finish, reward_metrics, score
from swift_megatron_grpo.metrics import PhaseTimer
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.training.loss import make_loss
from swift_megatron_grpo.training.reference import Reference
from swift_megatron_grpo.training.residency import Residency
from swift_megatron_grpo.types import Graded, Prompt, Rollout, Sample


@dataclass(frozen=True)
class Parts:
    """The stages of one run, built."""

    prompts: PromptSource
    generation: GenerationEngine
    rewards: RewardFunctions
    training: MegatronEngine
    reference: Reference | None
    residency: Residency
    export_weights: Callable[[], NamedWeights]  # the trained ones, under the checkpoint's names; all ranks together
    coordinator: Coordinator
    log: CompletionLog


class GRPOLoop:
    def __init__(self, config: GRPOConfig, parts: Parts, trainer_state: Any, steps_done: int = 0) -> None:
        self.config = config
        self.parts = parts
        self._trainer_state = trainer_state  # reward functions may read it
        self._loss = make_loss(config.loss)
        self._weights_version = steps_done
        self._steps_to_skip = steps_done % (config.batch.steps_per_generation * config.num_iterations)
        self._batches: deque[list[Sample]] = deque()  # one for each optimizer step that the last rollout still feeds

    def step(self) -> dict[str, float]:
        """One optimizer step; a rollout first, when the last one is used up."""
        timer = PhaseTimer()
        metrics: dict[str, float] = {}
        if not self._batches:
            metrics |= self._roll_out(timer)
        with timer("train"):
            self.parts.residency.for_training()
            metrics |= self.parts.training.train_step(self._batches.popleft(), self._loss)
        self._weights_version += 1
        return metrics | timer.seconds()

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> dict[str, float]:
        """Rewards of fresh completions of these prompts; nothing is trained. Leaves the GPU as generation needed it."""
        timer = PhaseTimer()
        graded = self._generate_and_grade(prompts, num_generations, timer)
        return self._reward_metrics(graded, num_generations) | timer.seconds()

    def _roll_out(self, timer: PhaseTimer) -> dict[str, float]:
        """Fills the queue of batches with the samples of one generation."""
        batch, grading = self.config.batch, self.config.grading
        prompts = self.parts.prompts.take(batch.rollout_prompts)
        graded = self._generate_and_grade(prompts, grading.num_generations, timer)
        self.parts.log.append(self._weights_version, graded)

        samples = [_to_sample(g, group=i // grading.num_generations) for i, g in enumerate(graded)]
        batches = [samples[i : i + batch.global_batch_size] for i in range(0, len(samples), batch.global_batch_size)]
        # The first step after a rollout trains the very policy that generated: its old log-probs are its own. The
        # policy of every later step has moved.
        for later in batches if self.config.num_iterations > 1 else batches[1:]:
            with timer("old_logprobs"):
                for index, values in self.parts.training.infer(later).items():
                    later[index].old_logprobs = values.logprobs
        if self.parts.reference is not None:
            with timer("ref_logprobs"):
                self.parts.residency.for_reference()
                for each in batches:
                    for index, values in self.parts.reference.infer(each).items():
                        each[index].ref_logprobs = values.logprobs
        on_policy = [replace(sample, old_logprobs=None) for sample in batches[0]]
        steps = [on_policy, *batches[1:], *batches * (self.config.num_iterations - 1)]
        self._batches.extend(steps[self._steps_to_skip :])
        self._steps_to_skip = 0  # steps that a resumed run has done
        return self._reward_metrics(graded, grading.num_generations)

    def _generate_and_grade(self, prompts: Sequence[Prompt], num_generations: int, timer: PhaseTimer) -> list[Graded]:
        requests = [prompt for prompt in prompts for _ in range(num_generations)]
        rollouts = self._generate(requests, timer)
        with timer("grading"):
            rewards = self._score(rollouts, num_generations)
            return finish(rollouts, rewards, num_generations, self.config.grading)

    def _generate(self, requests: Sequence[Prompt], timer: PhaseTimer) -> list[Rollout]:
        """The newest weights to the engine, then one completion for each request, on every rank."""
        engine, residency = self.parts.generation, self.parts.residency
        with timer("phase_switch"):
            residency.make_room(engine.memory_to_wake)
            engine.wake_weights()
        if engine.weights_version != self._weights_version:
            with timer("weight_sync"):
                residency.for_weight_sync()
                engine.load_weights(self.parts.export_weights(), self._weights_version)
        with timer("phase_switch"):
            residency.for_generation()
            engine.wake_cache()
        with timer("generation"):
            mine = engine.share.pick(requests)
            answers = self.parts.coordinator.all_gather_or_raise(
                lambda: self._answers(engine, mine), "generating completions"
            )
        with timer("phase_switch"):
            engine.sleep()
            residency.for_inference()  # the policy comes back while rewards are computed
        return [rollout for part in answers for rollout in part]

    def _answers(self, engine: GenerationEngine, mine: list[Prompt]) -> list[Rollout]:
        rollouts = engine.generate(mine, self.config.sampling)
        return rollouts if engine.share.speaks else []

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


def _to_sample(graded: Graded, group: int) -> Sample:
    rollout = graded.rollout
    trained = graded.reward is not None
    return Sample(
        tokens=rollout.prompt_ids + rollout.completion_ids,
        completion_mask=[False] * len(rollout.prompt_ids) + [trained] * len(rollout.completion_ids),
        advantage=graded.advantage,
        group=group,
        truncated=rollout.truncated,
        rollout_logprobs=(rollout.logprobs if trained else []) if rollout.logprobs is not None else None,
    )
