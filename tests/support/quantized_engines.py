"""Compares an engine that was synced with one that has started with the same checkpoint: see quantized_engine.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.forking.client import run_code
from tests.paths import REPOSITORY
from tests.support.runs import ON_CPU, environment_of_processes


def other_checkpoint(model: Path, folder: Path, seed: int) -> Path:
    """Write a checkpoint of the same model with other weights."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    for tensor in weights.values():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std().nan_to_num(0.02).clamp_min(0.01)
        tensor.copy_(tensor.float() + noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine(result: Path, *folders: Path) -> dict[str, Any]:
    """Run an engine with these checkpoints one after another, on a CPU in a fork, and return its report."""
    module, arguments = "tests.programs.e2e.quantized_engine", [str(result), *map(str, folders)]
    if ON_CPU:
        run_code("trainer", f"from {module} import *; main(Path(sys.argv[1]), map(Path, sys.argv[2:]))", *arguments)
    else:
        run = subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=REPOSITORY, env=environment_of_processes(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:]
    report: dict[str, Any] = torch.load(result, weights_only=True)
    return report


def check_syncs(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Check two syncs, bit for bit against an engine that starts with the last weights. Return its tensors."""
    checkpoints = [model, *(other_checkpoint(model, folder / f"other {seed}", seed) for seed in (1, 2))]
    synced, fresh = engine(folder / "synced.pt", *checkpoints), engine(folder / "fresh.pt", checkpoints[-1])
    assert synced["problems"] == [[], []] and synced["moved"] == []
    found, expected = synced["tensors"], fresh["tensors"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        assert tensor.stride() == expected[name].stride(), name
        assert torch.equal(tensor.float(), expected[name].float()), name
    assert synced["completion"] == fresh["completion"]
    [(wrong, what)] = synced["wrong"]
    assert "down_proj" in wrong and what == "the engine holds other values than were sent"
    return expected
