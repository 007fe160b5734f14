"""Evaluation of the validation datasets with the current weights: rewards, pass@k and maj@k."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.grading.advantages import usable
from swift_megatron_grpo.grading.results import outcome_metrics
from swift_megatron_grpo.grading.tries import Try, answer_of, tries_metrics
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.types import Graded, Outcome, Prompt

logger = logging.getLogger(__name__)

# Generates and grades completions of prompts; returns them with the seconds of phases and metrics of the weight sync.
Grade: TypeAlias = Callable[[Sequence[Prompt]], tuple[list[Graded], dict[str, float]]]


@dataclass(frozen=True, slots=True)
class _Scored:
    """One completion, without its tokens: a dataset may have millions of them."""

    outcome: Outcome
    attempt: Try | None  # None: the function that decides about correctness does not apply


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one run. Every rank calls `run`, and gets the same metrics."""

    config: GRPOConfig
    datasets: Mapping[str, PromptSource]  # by name
    grade: Grade
    without_answers: set[str] = field(default_factory=set)  # datasets for which this was logged

    def run(self, on_round: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of all prompts and, if the datasets have names, of each dataset under its name."""
        scored: dict[str, list[_Scored]] = {}
        phases: Counter[str] = Counter()
        with same_random_numbers_afterwards():
            for name, source in self.datasets.items():
                scored[name] = []
                for prompts in self._rounds(source):
                    graded, of_phases = self.grade(prompts)
                    phases.update(of_phases)
                    scored[name] += map(self._score, graded)
                    on_round()
        metrics = self._metrics(list(chain.from_iterable(scored.values())))
        for name, of_dataset in scored.items():
            of_name = self._metrics(of_dataset)
            self._note_missing_answers(name, of_name)
            if name:
                metrics |= {f"{name}/{metric}": value for metric, value in of_name.items()}
        return metrics | phases

    def _rounds(self, source: PromptSource) -> list[list[Prompt]]:
        at_once = self.config.evaluation.prompts_at_once
        size = min(source.rows, self.config.evaluation.most_prompts or source.rows)
        source.taken = 0
        return [source.take(min(at_once, size - begin)) for begin in range(0, size, at_once)]

    def _score(self, graded: Graded) -> _Scored:
        evaluation = self.config.evaluation
        value = graded.rewards[evaluation.correct_reward]
        if value is None or not usable(value):
            return _Scored(graded.outcome, None)
        return _Scored(graded.outcome, Try(value >= evaluation.correct_from, answer_of(graded.rollout.text)))

    def _metrics(self, scored: Sequence[_Scored]) -> dict[str, float]:
        grading = self.config.grading
        size = self.config.evaluation.num_generations
        outcomes = [one.outcome for one in scored]
        groups = [scored[begin : begin + size] for begin in range(0, len(scored), size)]
        tries = [[one.attempt for one in group if one.attempt is not None] for group in groups]
        rewards = outcome_metrics(outcomes, grading.reward_names, size, grading.scale_rewards)
        return rewards | tries_metrics(tries, size)

    def _note_missing_answers(self, name: str, metrics: dict[str, float]) -> None:
        size = self.config.evaluation.num_generations
        if size > 1 and f"maj@{size}" not in metrics and name not in self.without_answers:
            self.without_answers.add(name)
            logger.info(
                f"no completion of the evaluation{f' on {name}' if name else ''} has an answer in <answer>, \\boxed or "
                f"after ####, so there is no maj@{size}"
            )


@contextmanager
def same_random_numbers_afterwards() -> Iterator[None]:
    """Restore the states of the default generators of this process and its GPU, also after an error.

    vLLM in the training processes draws from torch's generators, on a CPU even for completions that have seeds,
    and reward functions may draw from any.
    """
    python = random.getstate()
    arrays = np.random.get_state()
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(gpu)
