"""A run without an engine on the completions of another one: numbers are bitwise equal, and the same on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.support.runs import CANNED, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e
FP32 = ["--torch_dtype", "float32", "--fp16", "false", "--adam_eps", "1e-5", "--save_steps", "100"]


def numbers(run: Finished) -> list[dict[str, Any]]:
    assert run.code == 0, run.output[-4000:]
    other_metrics = ("time/", "speed/", "train_speed", "memory", "rollout/seconds", "sync_check/")
    return [
        {name: value for name, value in step.items() if isinstance(value, float) and not name.startswith(other_metrics)}
        for step in run.log
    ]


def test_a_replay_reproduces_the_numbers_of_the_run(folder: Path, dense: Path, dataset: Path) -> None:
    rollouts = folder / "vllm"
    flags = [*FP32, "--steps_per_generation", "2", "--train_iters", "4", "--beta", "0.04",
             "--rollout_importance_sampling_mode", "token_truncate"]  # fmt: skip
    first = megatron_rlhf(dense, dataset, folder / "first", 2, [*flags, "--rollout_dump", str(rollouts)])
    frame = pandas.concat(pandas.read_json(file, lines=True) for file in sorted(rollouts.glob("*.jsonl")))
    assert len(frame) == 2 * 16 and frame.weights_version.max() == 2
    assert {len(ids) for ids in frame.completion_ids} != {24} and frame.rewards.str[0].between(0, 1).all()

    flags += ["--rollout_replay", str(rollouts)]
    replay = megatron_rlhf(dense, dataset, folder / "again", 2, flags)
    assert "time/generation" in first.log[0] and "time/generation" not in replay.log[0]
    assert "vllm" not in "".join(line for line in replay.output.splitlines() if "EngineCore" in line)
    assert numbers(replay) == numbers(first) and len(replay.log) == 4

    other = megatron_rlhf(dense, dataset, folder / "tp2", 2, [*flags, "--tensor_model_parallel_size", "2",
                                                              "--sequence_parallel", "true"])  # fmt: skip
    for step, expected in zip(numbers(other), numbers(first), strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)


@pytest.mark.nightly
def test_a_resumed_run_continues_the_dump(folder: Path, dense: Path, dataset: Path) -> None:
    """Dynamic sampling gives a rollout several draws; a replay of both halves has exactly their numbers."""
    rollouts, crashed = folder / "canned", folder / "crashed"
    flags = [*FP32, *CANNED, "--save_steps", "100", "--dynamic_sample", "true",
             "--max_resample_times", "2",
             "--no_save_optim", "false", "--no_save_rng", "false", "--lr_decay_style", "constant"]  # fmt: skip
    dump = ["--rollout_dump", str(rollouts)]
    begun = megatron_rlhf(dense, dataset, crashed, 1, [*flags, *dump, "--train_iters", "3", "--save_steps", "2"])
    assert begun.code == 0, begun.output[-4000:]
    assert sorted(path.name for path in rollouts.glob("rollout-??????.jsonl"))[-1] == "rollout-000002.jsonl"
    assert list(rollouts.glob("rollout-*-draw-1.jsonl"))

    resume = ["--finetune", "false", "--mcore_model", str(crashed / "checkpoint-2"), "--train_iters", "4"]
    resumed = megatron_rlhf(dense, dataset, folder / "resumed", 1, [*flags, *dump, *resume])
    whole = megatron_rlhf(dense, dataset, folder / "whole", 1,
                          [*flags, "--rollout_replay", str(rollouts), "--train_iters", "4"])  # fmt: skip
    assert numbers(whole) == [*numbers(begun)[:2], *numbers(resumed)]


def test_rollout_only_trains_nothing(folder: Path, dense: Path, dataset: Path) -> None:
    rollouts = folder / "only"
    flags = [*FP32, *CANNED, "--rollout_only", "true", "--rollout_dump", str(rollouts), "--train_iters", "4",
             "--steps_per_generation", "2"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "rolled", 2, flags)
    assert run.code == 0, run.output[-4000:]
    assert len(list(rollouts.glob("rollout-*.jsonl"))) == 2 and not list(run.folder.glob("checkpoint-*"))
    logged = [json.loads(line) for line in (run.folder / "logging.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "reward" in line]
    assert len(steps) == 2 and not any("loss" in line for line in steps)
    frame = pandas.concat(pandas.read_json(file, lines=True) for file in sorted(rollouts.glob("*.jsonl")))
    assert (frame.weights_version == 0).all() and len(frame) == 32
