"""Plan templates with larger models, which were not run here, by `--check true`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.paths import REPOSITORY

from .runs import write_programs

FILE = "recipe-plans.json"
STEPS = 500  # of the templates
MEMORY = re.compile(r"The run fits: ([\d.]+) of ([\d.]+) GB")
TIME = re.compile(r"train phase ([\d.]+) s, generation ([\d.]+) s per step")


@dataclass(frozen=True)
class Large:
    model: str  # hub name
    shape: str  # of shapes.py
    model_type: str
    template: str
    gpus: int
    gpu: str
    what: str
    flags: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        given = f"NPROC_PER_NODE={self.gpus} MODEL={self.model} DATASET=data.jsonl OUTPUT=output"
        return " ".join([given, f"bash templates/{self.template}", *self.flags])


LARGE = (
    Large("Qwen/Qwen3-8B", "8b", "qwen3", "dense_colocate_full.sh", 8, "H100-80G", "all weights"),
    Large("Qwen/Qwen3-8B", "8b", "qwen3", "dense_colocate_lora.sh", 2, "H100-80G", "an adapter"),
    Large("Qwen/Qwen3-30B-A3B-Instruct-2507", "30b-qwen3-moe", "qwen3_moe", "moe_colocate_lora.sh", 8, "H100-80G",
          "an adapter"),
    Large("Qwen/Qwen2.5-VL-3B-Instruct", "3b-qwen2.5-vl", "qwen2_5_vl", "vl_lora.sh", 4, "H100-80G",
          "an adapter, images"),
)  # fmt: skip


def write_plans(out: Path) -> int:
    """Check every command with a folder that has the sizes of the model and made-up rows."""
    plans = []
    with TemporaryDirectory() as folder:
        for large in LARGE:
            plans.append(asdict(large) | {"command": large.command} | plan(large, Path(folder)))
            print(f"recipes: {large.command}: {plans[-1]}", flush=True)
    (out / FILE).write_text(json.dumps(plans, indent=1) + "\n")
    return 0 if all("seconds" in entry for entry in plans) else 1


def plan(large: Large, folder: Path) -> dict[str, float]:
    """Return the memory and the seconds of a step, as `--check true` estimates them, or nothing if it does not fit."""
    model, rows = folder / large.shape, folder / f"{large.model_type}.jsonl"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(write_programs(folder / "programs")), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
        "MODEL": str(model),
        "OUTPUT": str(folder / "output"),
        "NPROC_PER_NODE": str(large.gpus),
    }
    maker = "make_image_dataset.py" if "vl" in large.model_type else "make_dataset.py"
    dataset = rows / "data.jsonl" if "vl" in large.model_type else rows
    environment["DATASET"] = str(dataset)
    for command in (
        [sys.executable, "-m", "benchmarks.harness.models", large.shape, str(model), "--no-weights"],
        [sys.executable, str(REPOSITORY / "scripts" / maker), "--out", str(rows), "--rows", "64"],
    ):
        subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, capture_output=True)
    template = large.model_type.removesuffix("_moe")
    check = [str(REPOSITORY / "templates" / large.template), *large.flags, "--check", "true", "--check_gpu", large.gpu,
             "--model_type", large.model_type, "--template", template, "--reward_funcs", "format",
             "--load_from_cache_file", "false"]  # fmt: skip
    printed = subprocess.run(check, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True).stdout  # fmt: skip
    memory, time = MEMORY.search(printed), TIME.search(printed)
    if not memory or not time:
        print(printed[-6000:])
        return {}
    seconds = float(time[1]) + float(time[2])
    return {
        "memory": float(memory[1]),
        "of": float(memory[2]),
        "seconds": round(seconds, 1),
        "hours": round(seconds * STEPS / 3600, 1),
        "gpu_hours": round(seconds * STEPS * large.gpus / 3600, 1),
    }
