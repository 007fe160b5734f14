"""Rows that are sent once to a GPU give the step that rows for each expert give, on two GPUs in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, task
from tests.support.runs import SIZE_FOR_GPUS, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")]
LAYOUTS = {
    "loops": ["--moe_permute_fusion", "false"],
    "kernels": ["--moe_permute_fusion", "true"],
    "kernels, recomputed": ["--moe_permute_fusion", "true", "--recompute_granularity", "full", "--recompute_method",
                            "uniform", "--recompute_num_layers", "1"],
}  # fmt: skip


def test_the_step_is_the_same_with_fewer_rows(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model", "moe", [*SIZE_FOR_GPUS, "--experts", "16"]))
    tasks = []
    for name, flags in LAYOUTS.items():
        all_flags = base_flags(
            model, str(tmp_path), "full", "bfloat16", attention_backend="fused",
            extra=["--expert_model_parallel_size", "2", "--moe_grouped_gemm", "true", *flags],
        )  # fmt: skip
        tasks += [
            task("tests.programs.dist.row_dispatch:main", out=f"{tmp_path}/{name}-{once}", once=once,
                 flags=all_flags)
            for once in (True, False)
        ]  # fmt: skip
    launch(2, tasks, tmp_path)
    for name in LAYOUTS:
        once, each = (json.loads((tmp_path / f"{name}-{once}.0.json").read_text()) for once in (True, False))
        print(name, once["rows"], each["rows"], once["metrics"], each["metrics"])
        assert once["dispatchers"] == ["RowDispatcher"]
        assert once["rows"] < 0.8 * each["rows"]  # of two choices among 16 experts on two GPUs, 7 of 15 are on one
        assert once["metrics"] == pytest.approx(each["metrics"], rel=1e-2, abs=1e-6)
