"""Evaluation: every prompt of every dataset once, in rounds, with the metrics of all and of each."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.loop.evaluation import Evaluation, same_random_numbers_afterwards
from swift_megatron_grpo.settings.config import EvaluationConfig, GradingConfig, SamplingConfig
from swift_megatron_grpo.types import Graded, Prompt, Rollout

ANSWERS = {"even": ["\\boxed{4}", "\\boxed{4}", "\\boxed{5}"], "odd": ["\\boxed{5}", "\\boxed{5}", "\\boxed{4}"]}


def make(names: Sequence[str], rows: int, most: int | None = None, at_once: int = 2) -> tuple[Evaluation, list[Any]]:
    grading = GradingConfig(
        num_generations=2,
        reward_names=("Length", "Accuracy"),
        reward_weights=(1.0, 1.0),
        scale_rewards="group",
        bad_reward="stop",
    )
    sampling = SamplingConfig(0.0, 1.0, -1, 1.0, 4, (), seed=1)
    settings = EvaluationConfig(sampling, 3, at_once, most, False, correct_reward=1, correct_from=0.9, names={})
    config = SimpleNamespace(grading=grading, evaluation=settings)
    content = [{"messages": [{"role": "user", "content": "even" if row % 2 == 0 else "odd"}]} for row in range(rows)]
    datasets = {name: PromptSource(content, 0, False, label=f"{name}-") for name in names}
    rounds: list[list[str]] = []

    def grade(prompts: Sequence[Prompt]) -> tuple[GradedRollouts, dict[str, float]]:
        rounds.append([prompt.prompt_id for prompt in prompts])
        graded = [one for prompt in prompts for one in _graded(prompt)]
        return GradedRollouts.of(graded, functions=2), {"time/generation": 1.5}

    return Evaluation(config, datasets, grade), rounds  # type: ignore[arg-type]


def _graded(prompt: Prompt) -> list[Graded]:
    """Return three completions; 4 is correct. The accuracy does not apply to the third of an odd prompt."""
    kind = prompt.row["messages"][0]["content"]
    accuracies = [float("4" in text) for text in ANSWERS[kind]]
    return [
        Graded(Rollout(prompt, [1], [2, 3], None, text, "stop", 0), [2.0, accuracy], 2 + accuracy, 0.0)
        if (kind, place) != ("odd", 2)
        else Graded(Rollout(prompt, [1], [2, 3], None, text, "length", 0), [2.0, None], 2.0, 0.0)
        for place, (text, accuracy) in enumerate(zip(ANSWERS[kind], accuracies, strict=True))
    ]


def test_every_prompt_is_evaluated_once_and_in_rounds() -> None:
    evaluation, rounds = make(["math"], rows=5)
    done: list[None] = []
    for _ in range(2):  # each evaluation begins at the first prompt
        metrics = evaluation.run(lambda: done.append(None))
    assert rounds == 2 * [["math-0-0", "math-0-1"], ["math-0-2", "math-0-3"], ["math-0-4"]]
    assert len(done) == 6 and metrics["time/generation"] == 4.5


def test_a_limit_counts_the_prompts_of_each_dataset() -> None:
    evaluation, rounds = make(["a", "b"], rows=5, most=3)
    evaluation.run(lambda: None)
    assert [len(prompts) for prompts in rounds] == [2, 1, 2, 1]


def test_metrics_count_the_chosen_reward_from_its_threshold() -> None:
    """They leave out prompts to which it does not apply."""
    evaluation, _ = make(["math"], rows=2)
    metrics = evaluation.run(lambda: None)
    assert metrics["pass@1"] == metrics["math/pass@1"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["pass@2"] == pytest.approx((1 + 0) / 2)
    assert metrics["pass@3"] == 1.0  # only the even prompt has three graded tries
    assert metrics["maj@3"] == (1 + 0) / 2
    assert metrics["reward"] == pytest.approx((2 + 2 / 3 + 2) / 2)
    assert metrics["rewards/Accuracy/mean"] == pytest.approx(2 / 5)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)


def test_metrics_do_not_depend_on_the_size_of_a_round() -> None:
    results = []
    for at_once in (1, 2, 7):
        evaluation, _ = make(["a", "b"], rows=7, at_once=at_once)
        results.append({name: v for name, v in evaluation.run(lambda: None).items() if not name.startswith("time/")})
    assert results[0] == results[1] == results[2]
    assert {"reward", "a/reward", "b/reward", "a/pass@3", "b/maj@3"} <= set(results[0])


def test_a_dataset_without_a_name_has_no_metrics_of_its_own() -> None:
    evaluation, _ = make([""], rows=2)
    assert not [name for name in evaluation.run(lambda: None) if name.startswith("/")]


def test_missing_answers_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "even", ["4", "4", "5"])
    evaluation, _ = make(["code"], rows=1)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert "maj@3" not in evaluation.run(lambda: None)
    [line] = [record.message for record in caplog.records]
    assert line.startswith("no completion of the evaluation on code has an answer")


def test_seeds_of_an_evaluation_depend_on_the_prompt_alone() -> None:
    prompts = [Prompt(str(number), {}) for number in range(3)]
    requests = requests_for(prompts, 2, seed=7, version=None)
    together = {(r.prompt.prompt_id, r.seed) for r in requests}
    alone = {(r.prompt.prompt_id, r.seed) for prompt in prompts for r in requests_for([prompt], 2, 7, version=None)}
    assert together == alone and len({seed for _, seed in together}) == 6
    assert [request.index for request in requests] == list(range(6))
    assert not together & {(r.prompt.prompt_id, r.seed) for r in requests_for(prompts, 2, seed=8, version=None)}


def draw() -> list[float]:
    gpu = torch.rand(1, device=torch.cuda.current_device())
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), float(gpu)]


def test_an_evaluation_leaves_the_random_numbers_of_training_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    with pytest.raises(ZeroDivisionError), same_random_numbers_afterwards():
        draw()
        raise ZeroDivisionError
    assert [first, draw()] == expected
