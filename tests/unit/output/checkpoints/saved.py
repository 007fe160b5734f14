"""Checkpoints of the shape that ms-swift writes, with random contents, saved by CheckpointWriter on one rank."""

from __future__ import annotations

import random
from pathlib import Path

from swift_megatron_grpo.output.checkpoints.manifest import Identity, TokenizerIdentity, dataset_identity
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter
from tests.fakes.ranks import OneRank

ROWS = [{"messages": [{"role": "user", "content": f"prompt {row}"}], "solution": row} for row in range(100)]
IDENTITY = Identity(
    {"hidden_size": 64, "vocab_size": 300}, TokenizerIdentity(300, "aa"), dataset_identity(ROWS), experts_in_order=False
)
FILES = {
    "args.json": 400,
    "latest_checkpointed_iteration.txt": 1,
    "model.safetensors": 1500,
    "config.json": 200,
    "iter_0000001/.metadata": 300,
    "iter_0000001/common.pt": 250,
    "iter_0000001/__0_0.distcp": 2000,
    "iter_0000001/__0_1.distcp": 1100,
}


def writer(folder: Path) -> CheckpointWriter:
    return CheckpointWriter(folder, OneRank(), 1, IDENTITY, log=print)


def write_files(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(rng.randbytes(size))


def save(output_dir: Path, step: int, prompts: int = 8) -> Path:
    """Save checkpoint-<step> and return its folder."""
    saving = writer(output_dir)
    folder = output_dir / f"checkpoint-{step}"
    with saving.writing(step, prompts, estimate=1000):
        write_files(folder, step)
    assert saving.finish()
    return folder
