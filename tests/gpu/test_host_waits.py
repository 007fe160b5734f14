"""The host prepares micro batches ahead of the GPU: it does not wait for it in forward and backward.

A wait costs more than its own time: until it has launched the next kernels the GPU has nothing to do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.tools.check_layouts import base_flags, launch, task
from tests.e2e.runs import SIZE_FOR_GPUS, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FEW, MANY = 2, 6  # micro batches of a step
# By type of model: flags, and waits of a micro batch. fla counts the chunks of its sequences in the first delta net.
CASES: dict[str, tuple[list[str], int]] = {"dense": ([], 0), "qwen3_5": (["--vit_attn_impl", "sdpa"], 1)}


@pytest.mark.parametrize("kind", CASES)
def test_micro_batches_add_no_waits(tmp_path: Path, kind: str) -> None:
    extra, waits = CASES[kind]
    settings = argparse.Namespace(
        model=str(make_model(tmp_path / "model", kind, SIZE_FOR_GPUS)), tuner="full", dtype="bfloat16",
        attention_backend="flash", extra=[*extra, "--micro_batch_size", "1"],
    )  # fmt: skip
    flags = base_flags(settings, str(tmp_path))
    launch(1, [task("tests.gpu.host_waits:main", out=f"{tmp_path}/waits", flags=flags, counts=[FEW, MANY])], tmp_path)
    few, many = json.loads((tmp_path / "waits.json").read_text())
    print(kind, few, many)
    assert few, "the host reads the metrics of every step, so waits were not counted"
    added = {place: count - few.get(place, 0) for place, count in many.items() if count != few.get(place, 0)}
    assert sum(added.values()) == waits * (MANY - FEW), added
