"""Evaluation on validation datasets: before training, during it and at its end, without an effect on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import PLUGINS, REWARDS, Finished, make_dataset, megatron_rlhf, read_json_lines

# Parts of names in the log. A sync that an evaluation needs first is checked, and logged, with the evaluation.
NOT_COMPARED = ("time", "memory", "speed", "sync_check")


def evaluations(run: Finished) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.folder / "logging.jsonl") if "eval_reward" in line]


def _digits(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not any(part in name for part in NOT_COMPARED)}


@pytest.mark.e2e
def test_evaluation_logs_rewards_and_does_not_add_training_steps(tmp_path: Path, dense: Path, dataset: Path) -> None:
    validation = make_dataset(tmp_path / "validation.jsonl", rows=4)
    small_gpu = PLUGINS / "small_gpu.py"  # everything is restored before a checkpoint
    canned = PLUGINS / "canned_completions.py"
    flags = ["--val_dataset", str(validation), "--eval_steps", "1", "--eval_iters", "1", "--train_iters", "2",
             "--save_steps", "1", "--offload_model", "true", "--offload_optimizer", "true", "--offload_grad", "true",
             "--sync_check", "off", "--external_plugins", str(REWARDS), str(canned), str(small_gpu)]  # fmt: skip
    run = megatron_rlhf(dense, dataset, tmp_path / "run", 1, flags)
    assert run.code == 0, run.output[-3000:]
    assert len(run.log) == 2
    assert len(evaluations(run)) == 2
    for line in evaluations(run):
        assert 0 <= line["eval_reward"] <= 1 and line["eval_completions/mean_length"] > 0
        assert {"eval_pass@1", "eval_pass@4"} <= line.keys()


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_run_with_evaluations_trains_the_same_digits_as_one_without(
    tmp_path: Path, dense: Path, dataset: Path
) -> None:
    """Two datasets by name, with their own sampling; completions are vLLM's, sampled with its own random numbers."""
    first, second = make_dataset(tmp_path / "first.jsonl", rows=1), make_dataset(tmp_path / "other.jsonl", rows=5)
    evaluated = ["--val_dataset", str(first), str(second), "--eval_names", "small", "large", "--eval_steps", "1",
                 "--eval_before_train", "true", "--num_generations_eval", "2", "--eval_temperature", "0.7",
                 "--eval_max_completion_length", "12", "--eval_correct_from", "0.2"]  # fmt: skip
    without = megatron_rlhf(dense, dataset, tmp_path / "without", 1)
    run = megatron_rlhf(dense, dataset, tmp_path / "with", 1, evaluated)
    assert without.code == run.code == 0, run.output[-3000:]
    steps = [[_digits(line) for line in log] for log in (without.log, run.log)]
    assert steps[0] == steps[1], json.dumps(steps, indent=1)
    lines = evaluations(run)
    assert [line["iteration"] for line in lines] == ["0/2", "1/2", "2/2"]
    for line in lines:
        assert line["eval_reward"] == pytest.approx((line["eval_small/reward"] + 5 * line["eval_large/reward"]) / 6)
        assert 0 <= line["eval_large/pass@1"] <= line["eval_large/pass@2"] <= 1
        assert line["eval_completions/max_length"] <= 12
