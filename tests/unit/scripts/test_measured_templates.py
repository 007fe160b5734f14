"""Templates for mixtures of experts train with the settings that benchmarks/h200 measured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.harness.results import Run
from tests.paths import REPOSITORY

# Of vLLM's cache, too: the measured completions are shorter than those that the templates allow.
OF_THE_BENCHMARK = ("share_prompts", "sync_check", "vllm_mode", "vllm_server_base_url", "router_replay_mode",
                    "vllm_engine_kwargs", "vllm_gpu_memory_utilization")  # fmt: skip


def flags(arguments: list[str]) -> dict[str, list[str]]:
    """Return the values of each flag, of the last one where it is repeated."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:]
            found[name] = []
        else:
            found[name].append(argument)
    return found


def trainer(template: str, command: list[str], folder: Path) -> tuple[int, Mapping[str, list[str]]]:
    """Return the number of ranks and the flags. A fake `megatron`, first on the path, prints them."""
    fake = folder / "megatron"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$NPROC_PER_NODE" "$@"\n')
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MODEL": "m", "DATASET": "d", "OUTPUT": "o"}
    environ.pop("NPROC_PER_NODE", None)
    path = REPOSITORY / "templates" / template
    ranks, _, *arguments = subprocess.check_output([path, *command], env=environ, text=True).splitlines()
    return int(ranks), flags(arguments)


@pytest.mark.parametrize(
    ("template", "command", "measured"),
    [
        ("moe_full.sh", [], "moe-30b-a3b-full-ep4"),
        ("moe_full.sh", [], "step-full-30b-ep4"),
        ("moe_server.sh", ["train"], "moe-30b-a3b-lora-server-ep2-disabled"),
    ],
)
def test_a_template_has_the_measured_layout_and_budget(
    template: str, command: list[str], measured: str, tmp_path: Path
) -> None:
    run = Run.read(REPOSITORY / "benchmarks" / "h200" / f"{measured}.json")
    [process] = run.processes
    ranks, of_template = trainer(template, command, tmp_path)
    expected = {name: value for name, value in flags(run.flags + process.flags).items() if name not in OF_THE_BENCHMARK}
    assert ranks == int(process.setting.removeprefix("dp").split("+")[0])
    assert {name: of_template.get(name) for name in expected} == expected
    assert of_template.get("tensor_model_parallel_size", ["1"]) == ["1"]


def test_the_template_of_qwen3_5_has_the_measured_budget(tmp_path: Path) -> None:
    ranks, of_template = trainer("qwen3_5_moe_server.sh", ["train"], tmp_path)
    assert (ranks, of_template["expert_model_parallel_size"]) == (2, ["2"])
    assert of_template["max_tokens_per_micro_batch"] == ["8192"]
