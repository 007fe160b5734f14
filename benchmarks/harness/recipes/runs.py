"""Read what a run of a recipe has logged; write the programs that templates call."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.learning.steps import checkpoints, read_steps, rows_of_steps

SETTINGS = ("tuner_type", "torch_dtype", "lr", "train_iters", "num_generations", "global_batch_size", "max_length",
            "max_completion_length", "eval_steps", "seed")  # fmt: skip
PROGRAMS = {
    "megatron": "-P -m swift.cli._megatron.main",
    "swift": "-P -m swift.cli.main",
    "swift-megatron-grpo": "-P -m swift_megatron_grpo.cli",
    "python": "",
}


def write_programs(folder: Path) -> Path:
    """Write the commands of templates into a folder for PATH: packages may be installed without console scripts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def logged(output: Path) -> dict[str, Any]:
    """Return the settings and the series of a run: one value per step, and the accuracy of each evaluation."""
    arguments = json.loads((output / "args.json").read_text()) if (output / "args.json").is_file() else {}
    log = read_rows(output / "logging.jsonl")
    return {
        "settings": {name: arguments.get(name) for name in SETTINGS},
        **read_steps("ours", output, int(arguments.get("eval_steps") or 1)),
        "uniform": [round(float(row["frac_reward_zero_std"]), 4) for row in rows_of_steps(log)],
        "generation": [round(float(row["time/generation"]), 3) for row in rows_of_steps(log)],
        "held_out": [
            {"step": int(row["iteration"].split("/")[0]), "accuracy": round(float(row["eval_pass@1"]), 4)}
            for row in log
            if "eval_pass@1" in row
        ],
    }


def last_weights(output: Path, merged: bool) -> Path | None:
    """Return the last checkpoint, the merged one of an adapter."""
    saved = checkpoints(output)
    if not saved:
        return None
    folder = output / f"checkpoint-{max(saved)}"
    return folder.with_name(f"{folder.name}-merged") if merged else folder
