"""Evaluation of the validation datasets with the current weights: rewards, pass@k and maj@k."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
class EvaluationDataset:
    name: str
    prompts: PromptSource
    size: int  # rows


@dataclass(frozen=True, slots=True)
class _Scored:
    """One completion, without its tokens: a dataset may have millions of them."""

    outcome: Outcome
    attempt: Try | None  # None: the function that decides about correctness does not apply


class Evaluation:
    """The evaluation of one run. Every rank calls `run`, and gets the same metrics."""

    def __init__(self, config: GRPOConfig, datasets: Sequence[EvaluationDataset], grade: Grade) -> None:
        self._config = config
        self._datasets = datasets
        self._grade = grade
        self._without_answers: set[str] = set()  # datasets for which this was logged

    def run(self, on_round: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of all prompts and, if the datasets have names, of each dataset under its name."""
        scored: dict[str, list[_Scored]] = {}
        phases: Counter[str] = Counter()
        with same_random_numbers_afterwards():
            for dataset in self._datasets:
                scored[dataset.name] = []
                for prompts in self._rounds(dataset):
                    graded, of_phases = self._grade(prompts)
                    phases.update(of_phases)
                    scored[dataset.name] += map(self._score, graded)
                    on_round()
        metrics = self._metrics([one for of_dataset in scored.values() for one in of_dataset])
        for name, of_dataset in scored.items():
            of_name = self._metrics(of_dataset)
            self._note_missing_answers(name, of_name)
            if name:
                metrics |= {f"{name}/{metric}": value for metric, value in of_name.items()}
        return metrics | phases

    def _rounds(self, dataset: EvaluationDataset) -> list[list[Prompt]]:
        most = self._config.evaluation.most_prompts
        at_once = self._config.evaluation.prompts_at_once
        size = dataset.size if most is None else min(dataset.size, most)
        dataset.prompts.taken = 0
        return [dataset.prompts.take(min(at_once, size - begin)) for begin in range(0, size, at_once)]

    def _score(self, graded: Graded) -> _Scored:
        evaluation = self._config.evaluation
        value = graded.rewards[evaluation.correct_reward]
        if value is None or not usable(value):
            return _Scored(graded.outcome, None)
        answer = answer_of(graded.rollout.text)
        return _Scored(graded.outcome, Try(value >= evaluation.correct_from, answer))

    def _metrics(self, scored: Sequence[_Scored]) -> dict[str, float]:
        grading = self._config.grading
        size = self._config.evaluation.num_generations
        outcomes = [one.outcome for one in scored]
        groups = [scored[begin : begin + size] for begin in range(0, len(scored), size)]
        tries = [[one.attempt for one in group if one.attempt is not None] for group in groups]
        rewards = outcome_metrics(outcomes, grading.reward_names, size, grading.scale_rewards)
        return rewards | tries_metrics(tries, size)

    def _note_missing_answers(self, name: str, metrics: dict[str, float]) -> None:
        size = self._config.evaluation.num_generations
        if size > 1 and f"maj@{size}" not in metrics and name not in self._without_answers:
            self._without_answers.add(name)
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
