"""Rewards on a validation set are logged during training under eval_ names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import REWARDS, make_dataset, megatron_rlhf


@pytest.mark.e2e
def test_evaluation_logs_rewards_and_does_not_add_training_steps(tmp_path: Path, dense: Path, dataset: Path) -> None:
    validation = make_dataset(tmp_path / "validation.jsonl", rows=4)
    small_gpu = Path(__file__).with_name("small_gpu.py")  # everything is restored before a checkpoint
    canned = Path(__file__).with_name("canned_completions.py")
    flags = ["--val_dataset", str(validation), "--eval_steps", "1", "--eval_iters", "1", "--train_iters", "2",
             "--save_steps", "1", "--offload_model", "true", "--offload_optimizer", "true", "--offload_grad", "true",
             "--sync_check", "off", "--external_plugins", str(REWARDS), str(canned), str(small_gpu)]  # fmt: skip
    run = megatron_rlhf(dense, dataset, tmp_path / "run", 1, flags)
    assert run.code == 0, run.output[-3000:]
    assert len(run.log) == 2
    lines = [json.loads(line) for line in (run.folder / "logging.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_reward" in line]
    assert len(evaluations) == 2
    assert all(0 <= line["eval_reward"] <= 1 and line["eval_completions/mean_length"] > 0 for line in evaluations)
