"""A run on a GPU that goes on from a checkpoint: kernels add in any order there, so close to the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.e2e.runs import REWARDS, SIZE_FOR_GPUS, make_dataset, make_model, megatron_rlhf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")]


def weights(checkpoint: Path) -> torch.Tensor:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return torch.cat([file.get_tensor(name).flatten().float() for name in sorted(file.keys())])


def test_a_resumed_run_goes_on_with_the_same_weights_and_optimizer(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "dense", SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=64)
    flags = ["--attention_backend", "fused", "--train_iters", "4", "--save_steps", "2", "--global_batch_size", "16",
             "--lr", "1e-3", "--external_plugins", str(REWARDS), "--seed_completions", "true",
             "--no_save_optim", "false", "--no_save_rng", "false",
             "--sleep_level", "2", "--offload_model", "true", "--offload_optimizer", "true"]  # fmt: skip
    whole = megatron_rlhf(model, dataset, tmp_path / "whole", 1, flags)
    assert whole.code == 0, whole.output[-4000:]
    saved = whole.folder / "checkpoint-2"
    again = megatron_rlhf(model, dataset, tmp_path / "again", 1,
                          [*flags, "--finetune", "false", "--mcore_model", str(saved)])  # fmt: skip
    assert again.code == 0, again.output[-4000:]
    assert len(whole.log) == 4 and len(again.log) == 2
    first, theirs = again.log[0], whole.log[2]
    print(*([step[name] for name in ("reward", "grad_norm", "completions/mean_length")] for step in (first, theirs)))
    assert first["learning_rate"] == theirs["learning_rate"]
    assert first["completions/mean_length"] == pytest.approx(theirs["completions/mean_length"], rel=0.02)
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
    # An optimizer that begins anew moves every weight by the learning rate and goes elsewhere.
    before, after, resumed = (weights(path) for path in (saved, whole.last_checkpoint, again.last_checkpoint))
    apart = ((resumed - after).norm() / (after - before).norm()).item()
    print("apart", apart)
    assert apart < 0.1
