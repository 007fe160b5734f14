"""One step of GRPO, as prose:

prompts -> generation -> grading -> (other prompts for groups that teach nothing) -> advantages -> samples -> (old and
reference log-probs, where they are needed) -> Megatron forward, backward and update. The new weights travel to the
engine when it generates next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from swift_megatron_grpo.completion_log import CompletionLog
from swift_megatron_grpo.config import GRPOConfig
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.deadlines.watchdog import Watchdog
from swift_megatron_grpo.first_rollout import FirstRollout
from swift_megatron_grpo.generation.engine import GenerationEngine, Request, Share, requests_for
from swift_megatron_grpo.grading import RewardFunctions, compare, grade, penalise, resample, reward_metrics, score
from swift_megatron_grpo.kl_control import Beta, divergences
from swift_megatron_grpo.metrics import PhaseTimer
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.recording.dump import RolloutDump
from swift_megatron_grpo.recording.replay import RolloutReplay
from swift_megatron_grpo.selection import entropy_threshold, select_tokens
from swift_megatron_grpo.sync import WeightSync
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
    generation: GenerationEngine | None  # None: completions are replayed
    rewards: RewardFunctions
    training: MegatronEngine
    reference: Reference | None
    residency: Residency
    sync: WeightSync | None  # None: no engine
    first_rollout: FirstRollout
    coordinator: Coordinator
    log: CompletionLog
    dump: RolloutDump | None
    replay: RolloutReplay | None  # in place of generation and rewards
    watchdog: Watchdog


class GRPOLoop:
    def __init__(self, config: GRPOConfig, parts: Parts, trainer_state: Any, steps_done: int = 0) -> None:
        self.config = config
        self.parts = parts
        self._trainer_state = trainer_state  # reward functions may read it
        self.beta = Beta(config.loss.beta, config.kl)
        self._outputs: tuple[Output, ...] = ("logprob", "entropy") if reads_entropy(config.loss) else ("logprob",)
        self._weights_version = steps_done
        self._steps_to_skip = steps_done % (config.batch.steps_per_generation * config.num_iterations)
        self._compared_with_engine = False
        self._batches: deque[list[Sample]] = deque()  # one for each optimizer step that the last rollout still feeds

    def step(self) -> dict[str, float]:
        """One optimizer step; a rollout first, when the last one is used up."""
        timer = PhaseTimer(self.parts.watchdog.phase)
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

    def roll_out(self) -> dict[str, float]:
        """A rollout, graded and dumped; nothing is trained."""
        timer = PhaseTimer(self.parts.watchdog.phase)
        metrics: dict[str, float] = {}
        graded = self._completions(metrics, timer)
        graded = compare(graded, self.config.grading.num_generations, self.config.grading)
        self.parts.log.append(self._weights_version, graded)
        return metrics | self._reward_metrics(graded, self.config.grading.num_generations) | timer.seconds()

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> dict[str, float]:
        """Rewards of fresh completions of these prompts; nothing is trained. Leaves the GPU as generation needed it."""
        timer = PhaseTimer(self.parts.watchdog.phase)
        metrics: dict[str, float] = {}
        graded = self._generate_and_grade(prompts, num_generations, metrics, timer)
        graded = compare(graded, num_generations, self.config.grading)
        return metrics | self._reward_metrics(graded, num_generations) | timer.seconds()

    def _roll_out(self, timer: PhaseTimer) -> dict[str, float]:
        """Fills the queue of batches with the samples of one generation."""
        batch, grading = self.config.batch, self.config.grading
        metrics: dict[str, float] = {}
        graded = self._completions(metrics, timer)
        if self.config.kl.in_reward:
            graded = self._penalise(graded, metrics, timer)
        graded = compare(graded, grading.num_generations, grading)
        self.parts.log.append(self._weights_version, graded)

        samples = [_to_sample(g, i // grading.num_generations, grading.overlong_filter) for i, g in enumerate(graded)]
        batches = [samples[i : i + batch.global_batch_size] for i in range(0, len(samples), batch.global_batch_size)]
        self._compare_with_engine(batches[0], timer)
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

    def _completions(self, metrics: dict[str, float], timer: PhaseTimer) -> list[Graded]:
        """Of the next prompts, with their total rewards."""
        prompts = self.parts.prompts.take(self.config.batch.rollout_prompts)
        graded = self._draw(prompts, 0, metrics, timer)
        if self.config.grading.max_resample_times:
            graded = self._replace_uniform_groups(graded, metrics, timer)
        return graded

    def _draw(self, prompts: Sequence[Prompt], draw: int, metrics: dict[str, float], timer: PhaseTimer) -> list[Graded]:
        """Generated and graded, and dumped if asked for; or as another run has dumped them."""
        parts, num_generations = self.parts, self.config.grading.num_generations
        rollout = parts.prompts.taken // self.config.batch.rollout_prompts - 1
        if parts.replay is not None:
            with timer("replay"):
                return grade(*parts.replay.take(rollout, draw, prompts, num_generations), self.config.grading)
        graded = self._generate_and_grade(prompts, num_generations, metrics, timer)
        if parts.dump is not None:
            write = partial(parts.dump.write, rollout, draw, graded)
            with timer("dump"):
                parts.coordinator.all_gather_or_raise(write, "--rollout_dump")
        return graded

    def _replace_uniform_groups(
        self, graded: list[Graded], metrics: dict[str, float], timer: PhaseTimer
    ) -> list[Graded]:
        grading, per_rollout = self.config.grading, self.config.batch.rollout_prompts
        # Where the spare prompts go on depends on the number of rollouts only, so a resumed run draws the same ones.
        rollouts = self.parts.prompts.taken // per_rollout
        self.parts.spare_prompts.taken = rollouts * grading.max_resample_times * per_rollout

        draws = count(1)  # the first one is in `graded`

        def draw(groups: int) -> list[Graded]:
            return self._draw(self.parts.spare_prompts.take(groups), next(draws), metrics, timer)

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

    def _generate_and_grade(
        self, prompts: Sequence[Prompt], num_generations: int, metrics: dict[str, float], timer: PhaseTimer
    ) -> list[Graded]:
        requests = requests_for(prompts, num_generations, self.config.sampling.seed, self._weights_version)
        assert self.parts.sync is not None
        metrics |= self.parts.sync(self._weights_version, timer)
        rollouts: dict[int, Rollout] = {}
        rewards: dict[int, list[float | None]] = {}
        for groups in self._generate(requests, num_generations, timer):
            with timer("grading"):
                rewards |= zip(groups, self._score(list(groups.values()), num_generations), strict=True)
            rollouts |= groups
        order = range(len(requests))
        return grade([rollouts[i] for i in order], [rewards[i] for i in order], self.config.grading)

    def _generate(self, requests: Sequence[Request], unit: int, timer: PhaseTimer) -> Iterator[dict[int, Rollout]]:
        """One completion for each request, on every rank: whole groups, as they are complete. The engine is awake; it
        sleeps when the last ones are told."""
        engine, sync = self.parts.generation, self.parts.sync
        assert engine is not None and sync is not None
        generation = engine.generate(engine.share.pick(requests), unit, self.config.sampling)
        missing = len(requests)
        while missing:
            with timer("generation"):
                told = self.parts.coordinator.all_gather_or_raise(generation.next, "generating completions")
            if any(news.lacks_weights for news in told):
                sync.again(self._weights_version, timer)
            finished = {index: rollout for news in told for index, rollout in news.finished.items()}
            self._check_versions(finished.values())
            missing -= len(finished)
            if not missing:
                with timer("phase_switch"):
                    engine.sleep()
                    self.parts.residency.for_inference()  # the policy comes back while rewards are computed
            if finished:
                yield finished

    def _compare_with_engine(self, samples: Sequence[Sample], timer: PhaseTimer) -> None:
        """Once in a run."""
        rounding = None if self.parts.sync is None else self.parts.sync.rounding
        if rounding is not None and not self._compared_with_engine:
            with timer("sync_check"):
                self.parts.first_rollout.check(samples, rounding)
        self._compared_with_engine = True

    def _check_versions(self, rollouts: Iterable[Rollout]) -> None:
        others = {rollout.weights_version for rollout in rollouts} - {self._weights_version}
        if others:
            raise RuntimeError(
                f"completions of weights {sorted(others)} came back where those of {self._weights_version} were asked "
                "for: the engine has not generated with the weights of the last sync"
            )

    def _score(self, rollouts: list[Rollout], num_generations: int) -> list[list[float | None]]:
        """Every rank grades some groups, whole ones, and tells the others."""
        groups = [rollouts[i : i + num_generations] for i in range(0, len(rollouts), num_generations)]
        coordinator = self.parts.coordinator
        share = Share(coordinator.rank, coordinator.world_size, speaks=True)
        mine = [rollout for group in share.pick(groups) for rollout in group]
        parts = coordinator.all_gather_or_raise(
            lambda: score(mine, self.parts.rewards, self._trainer_state, self._reward_limit) if mine else [], "grading"
        )
        return [row for part in parts for row in part]

    @contextmanager
    def _reward_limit(self, what: str) -> Iterator[float | None]:
        seconds = self.config.deadlines.reward
        if seconds is None:
            yield None
        else:
            with self.parts.watchdog.limit(what, seconds, "--reward_timeout"):
                yield seconds

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
        completion_mask=[False] * len(rollout.prompt_ids) + [trained and mine for mine in rollout.sampled_mask],
        advantage=graded.advantage,
        group=group,
        truncated=rollout.truncated,
        rollout_logprobs=(rollout.logprobs if trained else []) if rollout.logprobs is not None else None,
        left_out=rollout.length if too_long else 0,
    )
