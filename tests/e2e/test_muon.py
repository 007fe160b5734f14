"""A run with Muon resumes to the same digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.muon import MUON, needs_muon
from tests.support.runs import megatron_rlhf

pytestmark = [pytest.mark.e2e, needs_muon]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_resumed_run_matches_an_uninterrupted_one(dtype: str, tmp_path: Path, dense: Path, dataset: Path) -> None:
    flags = [*MUON, "--torch_dtype", dtype, "--fp16", "false", "--train_iters", "4", "--seed_completions", "true",
             "--no_save_optim", "false", "--no_save_rng", "false", "--tensor_model_parallel_size", "2"]  # fmt: skip
    whole = megatron_rlhf(dense, dataset, tmp_path / "whole", 2, flags)
    assert whole.code == 0, whole.output[-4000:]
    resume = ["--finetune", "false", "--mcore_model", str(whole.folder / "checkpoint-2")]
    resumed = megatron_rlhf(dense, dataset, tmp_path / "resumed", 2, [*flags, *resume])
    assert resumed.code == 0, resumed.output[-4000:]
    assert len(whole.log) == 4 and len(resumed.log) == 2
    for step, expected in zip(resumed.log, whole.log[2:], strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert step[name] == expected[name], name
