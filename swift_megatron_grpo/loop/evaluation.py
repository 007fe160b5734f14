"""Evaluation of the validation datasets with the current weights: rewards, pass@k and maj@k."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.grading.graded import GradedRollouts, Outcomes
from swift_megatron_grpo.grading.metrics import outcome_metrics
from swift_megatron_grpo.grading.tries import Try, answer_of, tries_metrics
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.types import Prompt

logger = logging.getLogger(__name__)

# Generates and grades completions of prompts; returns them with the seconds of phases and metrics of the weight sync.
Grade: TypeAlias = Callable[[Sequence[Prompt]], tuple[GradedRollouts, dict[str, float]]]


class _Scored(NamedTuple):
    """Completions without their tokens: a dataset may have millions of them."""

    outcomes: Outcomes
    tries: list[Try | None]  # None: the function that decides about correctness does not apply


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one run. Every rank calls `run`, and gets the same metrics."""

    config: GRPOConfig
    datasets: Mapping[str, PromptSource]  # by name
    grade: Grade
    without_answers: set[str] = field(default_factory=set)  # datasets for which this was logged

    def run(self, on_round: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of all prompts and, if the datasets have names, of each dataset under its name."""
        evaluation = self.config.evaluation
        scored: dict[str, list[_Scored]] = {}
        phases: Counter[str] = Counter()
        with same_random_numbers_afterwards():
            for name, source in self.datasets.items():
                scored[name] = []
                source.taken = 0
                size = min(source.rows, evaluation.most_prompts or source.rows)
                for begin in range(0, size, evaluation.prompts_at_once):
                    prompts = source.take(min(evaluation.prompts_at_once, size - begin))
                    graded, of_phases = self.grade(prompts)
                    phases.update(of_phases)
                    scored[name].append(self._score(graded))
                    on_round()
        metrics = self._metrics(list(chain.from_iterable(scored.values())))
        for name, of_dataset in scored.items():
            of_name = self._metrics(of_dataset)
            tries = evaluation.num_generations
            if tries > 1 and f"maj@{tries}" not in of_name and name not in self.without_answers:
                self.without_answers.add(name)
                logger.info(
                    f"no completion of the evaluation{f' on {name}' if name else ''} has an answer in <answer>, "
                    f"\\boxed or after ####, so there is no maj@{tries}"
                )
            if name:
                metrics |= {f"{name}/{metric}": value for metric, value in of_name.items()}
        return metrics | phases

    def _score(self, graded: GradedRollouts) -> _Scored:
        evaluation = self.config.evaluation
        scores = graded.outcomes.scores.column(evaluation.correct_reward)
        correct = (scores.values >= evaluation.correct_from).tolist()
        tries = [
            Try(is_correct, answer_of(rollout.text)) if counts else None
            for rollout, is_correct, counts in zip(graded.rollouts, correct, scores.valid.tolist(), strict=True)
        ]
        return _Scored(graded.outcomes, tries)

    def _metrics(self, scored: Sequence[_Scored]) -> dict[str, float]:
        grading = self.config.grading
        size = self.config.evaluation.num_generations
        outcomes = Outcomes.joined([part.outcomes for part in scored])
        every = list(chain.from_iterable(part.tries for part in scored))
        groups = [every[begin : begin + size] for begin in range(0, len(every), size)]
        tries = [[one for one in group if one is not None] for group in groups]
        rewards = outcome_metrics(outcomes, grading.reward_names, size, grading.scale_rewards)
        return rewards | tries_metrics(tries, size)


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
