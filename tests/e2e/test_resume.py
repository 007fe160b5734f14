"""A run that goes on from a checkpoint computes what the run computes that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf

pytestmark = pytest.mark.e2e
TENSOR_PARALLEL = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--torch_dtype", "bfloat16", *TENSOR_PARALLEL]),
        (2, ["--torch_dtype", "float32", "--fp16", "false"]),
        (1, ["--torch_dtype", "bfloat16", "--tuner_type", "lora"]),
    ],
    ids=["bf16-tp2", "fp32-dp2", "lora"],
)
def test_a_resumed_run(tmp_path: Path, dense: Path, dataset: Path, ranks: int, flags: list[str]) -> None:
    flags = [*flags, "--train_iters", "4", "--seed_completions", "true", "--no_save_optim", "false",
             "--no_save_rng", "false"]  # fmt: skip
    whole = megatron_rlhf(dense, dataset, tmp_path / "whole", ranks, flags)
    checkpoint = "--mcore_adapter" if "lora" in flags else "--mcore_model"
    flags += ["--finetune", "false", checkpoint, str(whole.folder / "checkpoint-2")]
    again = megatron_rlhf(dense, dataset, tmp_path / "again", ranks, flags)
    assert again.code == 0, again.output[-4000:]
    assert len(whole.log) == 4 and len(again.log) == 2
    for mine, theirs in zip(again.log, whole.log[2:], strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length", "learning_rate"):
            assert mine[name] == theirs[name], name
