"""On one GPU a micro batch of a dense model never makes the host wait for the GPU, and one of Qwen3.5 only in fla.

A wait costs more than its own time: until the host has launched the next kernels the GPU has nothing to do.
torch.cuda.set_sync_debug_mode finds the waits: copies to the host, and operators that read a size from the GPU. It
counts neither torch.cuda.synchronize, nor waits for events and streams, nor those of torch.distributed; and one rank
exchanges nothing with others.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, task
from tests.support.runs import SIZE_FOR_GPUS, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FEW, MANY = 2, 6  # micro batches of a step
FLA_INDEX = "fla/ops/utils/index.py"
# By type of model: flags, and waits of a micro batch. In the first delta net fla counts the chunks of all sequences,
# with repeat_interleave, which reads a sum and a check of its input.
CASES: dict[str, tuple[list[str], int]] = {"dense": ([], 0), "qwen3_5": (["--vit_attn_impl", "sdpa"], 2)}
LAYERS = "6"  # of Qwen3.5 three are delta nets, so waits in each of them would be three times as many


@pytest.mark.parametrize("kind", CASES)
def test_micro_batches_add_no_waits(tmp_path: Path, kind: str) -> None:
    extra, waits = CASES[kind]
    model = make_model(tmp_path / "model", kind, [*SIZE_FOR_GPUS, "--layers", LAYERS])
    flags = base_flags(str(model), str(tmp_path), "full", "bfloat16", extra=[*extra, "--micro_batch_size", "1"])
    launch(
        1,
        [task("tests.programs.gpu.host_waits:main", out=f"{tmp_path}/waits", flags=flags, counts=[FEW, MANY])],
        tmp_path,
    )
    few, many = (Counter(step) for step in json.loads((tmp_path / "waits.json").read_text()))
    print(kind, few, many)
    assert few, "the host reads the metrics of every step, so waits were not counted"
    added, missing = many - few, few - many
    assert not missing, missing
    assert all(f"/{FLA_INDEX}:" in place for place in added), added
    assert added.total() == waits * (MANY - FEW), added  # none at all in the dense model
