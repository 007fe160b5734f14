"""The templates pass a dry run at their own sizes; `-m slow` also trains two steps of each with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_scripts import rehearsal_of_text, run
from tests.paths import REPOSITORY
from tests.support.runs import ON_CPU

TEMPLATES = REPOSITORY / "templates"
# tests/unit runs cpu_quickstart.sh as it is, and verifiers.sh, which is agent.sh.
OTHERS = ("cpu_quickstart.sh", "recipe.sh", "verifiers.sh")
RECIPES = ("full", "lora", "boxed", "dynamic", "tool", "fp8", "servers")
NAMES = sorted(path.name for path in TEMPLATES.glob("*.sh") if path.name not in OTHERS)
NAMES += [f"recipe.sh {recipe}" for recipe in RECIPES]
IMAGES = "AI-ModelScope/clevr_cogen_a_train"  # ms-swift lists it with images; made-up rows take its place
PRINT_COMMAND = """#!/usr/bin/env bash
echo export NPROC_PER_NODE=$NPROC_PER_NODE
printf '%q ' megatron "$@"
"""
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not ON_CPU, reason="the ranks are forked")]


def trainer_command(name: str, folder: Path) -> str:
    """Run the template in bash with a `megatron` that prints the command line it was started with."""
    stub = folder / "bin" / "megatron"
    stub.parent.mkdir()
    stub.write_text(PRINT_COMMAND)
    (stub.parent / "swift").write_text("#!/bin/sh\nexec sleep 60\n")  # a recipe with servers starts one
    (stub.parent / "nvidia-smi").write_text("#!/bin/sh\n")  # else a recipe trains on the CPU
    for program in stub.parent.iterdir():
        program.chmod(0o755)
    environment = {
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "DATASET": IMAGES if name.startswith(("vl", "omni")) else "org/rows",
    }
    template, *recipe = name.split()
    command = [str(TEMPLATES / template)]
    if recipe:
        row = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "solution": "7", "problem": "{}"}
        (folder / "rows").mkdir()
        (folder / "rows" / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
        command += [*recipe, str(folder / "rows")]
        environment["MODEL"] = "Qwen/Qwen3-0.6B"
    elif "server" in name:
        command.append("train")
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_template_passes_a_dry_run(name: str, tmp_path: Path) -> None:
    rehearsal = rehearsal_of_text(trainer_command(name, tmp_path), tmp_path)
    assert rehearsal.published["train_iters"] and "num_train_epochs" not in rehearsal.published


def test_check_script_reads_a_template_that_computes_its_ranks_and_servers(tmp_path: Path) -> None:
    given = "export NPROC_PER_NODE=6 DATASET=org/rows\n"
    rehearsal = rehearsal_of_text(given + (TEMPLATES / "dense_server.sh").read_text(), tmp_path)
    assert rehearsal.world_size == 6 and rehearsal.server is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_template_trains_two_steps(name: str, tmp_path: Path) -> None:
    code, output = run(rehearsal_of_text(trainer_command(name, tmp_path), tmp_path), tmp_path)
    assert code == 0, output[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "output" / "logging.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "loss" in line]) == 2
