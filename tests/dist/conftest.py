"""Real torchrun ranks, started once for 1, 2 and 4 of them: starting takes longer than most of what they do."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.check_layouts import Layout, base_flags, launch, layout_tasks, task
from tests.e2e.runs import make_model

# mbs1 and mbs4: other micro batches on one rank
LAYOUTS = {
    "dense": ["mbs1", "mbs4", "tp2", "tp2+sp+mbs4", "pp2", "cp2", "dp2", "dp2+overlap", "tp2+pp2"],
    "moe": ["mbs1", "dp2+ep2"],
}
TUNERS = ["full", "lora"]
LOSS_LAYOUTS = ["mbs8", "pp2", "cp2", "dp4"]
LEARNING_RATE = 1000.0
# One step of plain gradient descent: what it moved, over the learning rate, is the gradient. The rate is large so that
# subtracting fp32 weights costs no precision.
DESCENT = ["--optimizer", "sgd", "--sgd_momentum", "0", "--lr", str(LEARNING_RATE), "--lr_decay_style", "constant",
           "--clip_grad", "0", "--weight_decay", "0", "--use_distributed_optimizer", "false"]  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """Where the ranks left what they computed."""

    folder: Path

    def model(self, kind: str) -> Path:
        return self.folder / f"{kind}-model"

    def layouts(self, kind: str, tuner: str) -> str:
        return str(self.folder / f"{kind}-{tuner}")

    def descent(self, kind: str) -> Path:
        return self.folder / f"{kind}-descent"

    def told(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}.{rank}.json"


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = Ranks(folder)
    tasks: dict[int, list[dict[str, object]]] = {1: [], 2: [], 4: []}
    for kind, layouts in LAYOUTS.items():
        make_model(ranks.model(kind), kind)
        for tuner in TUNERS:
            flags = make_flags(ranks, kind, tuner, "float32")
            if tuner == "lora":
                adapter = str(folder / f"{kind}-adapter")
                tasks[1].append(task("scripts.check_layouts:make_adapter", flags=flags, adapter=adapter))
                flags = [*flags, "--adapters", adapter]
            Path(ranks.layouts(kind, tuner)).mkdir()
            job = {"flags": flags, "batches": ["on-policy", "off-policy"], "folder": ranks.layouts(kind, tuner)}
            for number, found in layout_tasks(job, ["one", *layouts]).items():
                tasks[number] += found
        ranks.descent(kind).mkdir()
        descent = {
            "flags": make_flags(ranks, kind, "full", "float32", DESCENT),
            "batches": ["given"],
            "folder": str(ranks.descent(kind)),
        }
        tasks[1] += layout_tasks(descent, ["one"])[1]
    still = ["--micro_batch_size", "4", "--lr", "1e-30", "--global_batch_size", "16"]
    for name in ("one", *LOSS_LAYOUTS):
        arguments = {"out": str(folder / "losses"), "layout": name}
        arguments["flags"] = make_flags(ranks, "dense", "full", "float32", still)
        tasks[Layout.parse(name).ranks].append(task("tests.dist.every_loss:main", **arguments))
    for kind, layout in (("dense", ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
                         ("moe", ["--expert_model_parallel_size", "2"])):  # fmt: skip
        flags = make_flags(ranks, kind, "lora", "bfloat16", layout)
        tasks[2].append(task("tests.dist.lora_export:main", out=str(folder / f"export-{kind}"), kind=kind, flags=flags))
    flags = make_flags(ranks, "dense", "full", "bfloat16", ["--tensor_model_parallel_size", "2"])
    tasks[2].append(task("tests.dist.engine_faults:main", out=str(folder / "faults"), flags=flags))
    for number in sorted(tasks):
        launch(number, tasks[number], folder)
    return ranks


def make_flags(ranks: Ranks, kind: str, tuner: str, dtype: str, extra: list[str] | None = None) -> list[str]:
    model = str(ranks.model(kind))
    settings = argparse.Namespace(model=model, tuner=tuner, dtype=dtype, attention_backend="flash", extra=extra or [])
    return base_flags(settings, str(ranks.folder))
