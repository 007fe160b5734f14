"""A run on a GPU that resumes from a checkpoint is close to the uninterrupted run; GPU kernels add in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.runs import REWARDS, SIZE_FOR_GPUS, make_dataset, make_model, megatron_rlhf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")]


def weights(checkpoint: Path) -> torch.Tensor:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return torch.cat([file.get_tensor(name).flatten().float() for name in sorted(file.keys())])


def test_a_resumed_run_continues_with_the_same_weights_and_optimizer_state(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "dense", SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=64)
    flags = ["--attention_backend", "fused", "--train_iters", "4", "--save_steps", "2", "--global_batch_size", "16",
             "--lr", "1e-3", "--external_plugins", str(REWARDS), "--seed_completions", "true",
             "--no_save_optim", "false", "--no_save_rng", "false",
             "--sleep_level", "2", "--offload_model", "true", "--offload_optimizer", "true"]  # fmt: skip
    whole = megatron_rlhf(model, dataset, tmp_path / "whole", 1, flags)
    assert whole.code == 0, whole.output[-4000:]
    saved = whole.folder / "checkpoint-2"
    resumed = megatron_rlhf(model, dataset, tmp_path / "resumed", 1,
                            [*flags, "--finetune", "false", "--mcore_model", str(saved)])  # fmt: skip
    assert resumed.code == 0, resumed.output[-4000:]
    assert len(whole.log) == 4 and len(resumed.log) == 2
    step, expected = resumed.log[0], whole.log[2]
    names = ("reward", "grad_norm", "completions/mean_length")
    print(*([metrics[name] for name in names] for metrics in (step, expected)))
    assert step["learning_rate"] == expected["learning_rate"]
    assert step["completions/mean_length"] == pytest.approx(expected["completions/mean_length"], rel=0.02)
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    # An optimizer without its state would move every weight by the learning rate, in another direction.
    before, after, after_resume = (weights(path) for path in (saved, whole.last_checkpoint, resumed.last_checkpoint))
    difference = ((after_resume - after).norm() / (after - before).norm()).item()
    print("relative difference", difference)
    assert difference < 0.1
