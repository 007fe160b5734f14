"""Tests for machines with GPUs: `pytest -m gpu tests/gpu`. A test that needs more GPUs than exist is skipped.

`DRY_GPUS=4 pytest -m gpu tests/gpu/test_layouts.py tests/gpu/test_kernels.py tests/gpu/test_torch_attention.py` trains
on as many CPU ranks instead, to find mistakes in the tests themselves.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, layout_tasks, task
from tests.support.runs import SIZE_FOR_GPUS, make_model

LAYOUTS = {
    ("dense", "full"): ["mbs1", "tokens64", "tokens400", "tp2", "tp2+sp", "tp2+sp+recompute", "pp2", "pp2+vpp2", "cp2",
                        "dp2", "dp2+overlap", "tp2+sp+pp2", "dp4", "pp2+vpp2+dp2+tokens64", "mbs4+shared",
                        "tokens400+shared", "tp2+sp+mbs4+shared"],
    ("dense", "lora"): ["tp2+sp", "pp2+vpp2", "dp2", "mbs4+shared"],
    ("moe", "full"): ["mbs1", "mbs4+shared", "tp2+sp", "tp2+sp+etp2", "dp2+ep2", "dp4+ep4", "tp2+sp+dp2+ep2"],
}  # fmt: skip
LAYOUT_TEST = "test_a_layout_matches_one_gpu"
# A router in bf16 sends a few tokens to other experts. A second step, far from the first policy, would amplify this.
BATCHES = {"dense": ["on-policy", "off-policy"], "moe": ["given"]}
# Further runs on one rank, which train the same steps as the layouts of the dense model: name, flags.
VARIANTS = {
    "plain-kernels": ["--fast_kernels", "false"],
    "torch-attention": ["--attention_backend", "flash"],
    "recompute-elementwise": ["--recompute_elementwise", "true"],
}
RUN_LAYOUT = "swift_megatron_grpo.cli.check_layouts.ranks:run_layout"
RUN_VARIANT = {"recompute-elementwise": "tests.programs.gpu.phases:recompute_in_small_micro_batches"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Gpus:
    """Number of GPUs, and the folder with the results of all ranks; every rank has one GPU."""

    count: int
    folder: Path

    def model(self, kind: str) -> Path:
        return self.folder / f"{kind}-model"

    def layouts(self, kind: str, tuner: str) -> str:
        return str(self.folder / f"{kind}-{tuner}")


def make_flags(gpus: Gpus, kind: str, tuner: str, extra: list[str] | None = None) -> list[str]:
    model, folder = str(gpus.model(kind)), str(gpus.folder)
    return base_flags(model, folder, tuner, "bfloat16", attention_backend="fused", extra=extra or [])


@pytest.fixture(scope="module", autouse=True)
def memory_of_this_process() -> Iterator[None]:
    """Free what the tests of a file have left on the GPU, since later ones start runs that need nearly all of it."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    """Run the tasks of the selected tests, one launch for each number of ranks: most of the time is start-up."""
    count = int(os.environ.get("DRY_GPUS", torch.cuda.device_count()))
    gpus = Gpus(count, tmp_path_factory.mktemp("gpus"))
    if gpus.count == 0:
        pytest.skip("needs a CUDA device")
    for kind in ("dense", "moe"):
        make_model(gpus.model(kind), kind, SIZE_FOR_GPUS)
    tasks: dict[int, list[dict[str, object]]] = {1: [], 2: [], 4: []}
    selected = {item.name for item in request.session.items}
    alone = all(name.startswith(f"{LAYOUT_TEST}[") for name in selected)  # other tests read layouts as well
    for (kind, tuner), layouts in LAYOUTS.items():
        names = [f"{LAYOUT_TEST}[{kind}-{tuner}-{layout}]" for layout in layouts]
        wanted = [layout for layout, name in zip(layouts, names, strict=True) if name in selected or not alone]
        if wanted:
            add_layouts(gpus, tasks, kind, tuner, wanted)
    if not alone:
        add_runs_of_other_tests(gpus, tasks[1])
    for number in sorted(tasks):
        if number <= gpus.count and tasks[number]:
            launch(number, tasks[number], gpus.folder)
    return gpus


def add_layouts(
    gpus: Gpus, tasks: dict[int, list[dict[str, object]]], kind: str, tuner: str, layouts: list[str]
) -> None:
    flags = make_flags(gpus, kind, tuner)
    if tuner == "lora":
        adapter = str(gpus.folder / f"{kind}-adapter")
        tasks[1].append(task("swift_megatron_grpo.cli.check_layouts.ranks:make_adapter", flags=flags, adapter=adapter))
        flags = [*flags, "--adapters", adapter]
    job = training_job(kind, flags, Path(gpus.layouts(kind, tuner)))
    for number, layout_runs in layout_tasks(job, ["one", *layouts]).items():
        tasks[number] += layout_runs


def training_job(kind: str, flags: list[str], folder: Path) -> dict[str, Any]:
    """Make the folder and return arguments of run_layout: layouts and runs that are compared train the same steps."""
    folder.mkdir()
    return {"flags": flags, "batches": BATCHES[kind], "folder": str(folder), "one_prompt": True}


def add_runs_of_other_tests(gpus: Gpus, tasks: list[dict[str, object]]) -> None:
    for kind in ("dense", "moe"):
        step = {"out": str(gpus.folder / f"{kind}-step"), "flags": make_flags(gpus, kind, "full")}
        tasks.append(task("tests.programs.dist.engine_runs:one_step", **step))
    tasks.append(
        task(
            "tests.programs.dist.engine_runs:inference",
            out=str(gpus.folder / "inference"),
            flags=make_flags(gpus, "dense", "full"),
            others=[{"infer_max_tokens": 64}, {"infer_micro_batch_size": 8}],
        )
    )
    for kind in ("dense", "moe"):  # tests/programs/dist/hf_gradients.py has the same batch
        given = {**training_job(kind, make_flags(gpus, kind, "full"), gpus.folder / f"{kind}-given"),
                 "batches": ["given"], "one_prompt": False}  # fmt: skip
        tasks += layout_tasks(given, ["one"])[1]
    for name, extra in VARIANTS.items():
        job = training_job("dense", make_flags(gpus, "dense", "full", extra), gpus.folder / name)
        tasks.append(task(RUN_VARIANT.get(name, RUN_LAYOUT), name="one", **job))
