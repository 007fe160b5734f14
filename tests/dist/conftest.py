"""Real torchrun ranks, started once for 1, 2 and 4 of them: starting takes longer than most of what they do."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from swift_megatron_grpo.tools.check_layouts import DENSE, MOE, Variant, Task, base_flags, launch, layout_tasks, task
from tests.e2e.runs import SIZE_FOR_GPUS, make_model

TUNERS = ["full", "lora"]
LAYOUTS = {
    ("dense", "full"): DENSE,
    ("dense", "lora"): ["mbs1", "tokens64", "tp2+sp", "pp2+vpp2", "cp2", "dp2+overlap", "tp2+pp2"],
    ("moe", "full"): ["tokens64", *MOE],
    ("moe", "lora"): ["mbs1", "tp2+sp", "dp2+ep2", "pp2+vpp2"],  # mcore-bridge refuses LoRA with ETP
}
# The model that trains in one layout, its frozen reference copy in another.
REFERENCE_LAYOUTS = {
    "tp2, reference dp2": ("dense", "--tensor_model_parallel_size 2 --ref_tensor_model_parallel_size 1"),
    "pp2 vpp2, reference tp2": (
        "dense",
        "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 "
        "--ref_pipeline_model_parallel_size 1 --ref_tensor_model_parallel_size 2",
    ),
    "dp2, reference pp2": (
        "dense",
        "--max_tokens_per_micro_batch 64 --ref_pipeline_model_parallel_size 2",
    ),
    "ep2, reference cp2": (
        "moe",
        "--expert_model_parallel_size 2 --ref_expert_model_parallel_size 1 --ref_context_parallel_size 2",
    ),
}
TIED_LAYOUTS = ["pp2", "dp2+overlap"]
LOSS_LAYOUTS = ["mbs8", "pp2", "cp2", "dp2", "dp4"]
LEARNING_RATE = 1000.0
# One step of plain gradient descent: what it moved, over the learning rate, is the gradient. The rate is large so that
# subtracting fp32 weights costs no precision.
DESCENT = ["--optimizer", "sgd", "--sgd_momentum", "0", "--lr", str(LEARNING_RATE), "--lr_decay_style", "constant",
           "--clip_grad", "0", "--weight_decay", "0", "--use_distributed_optimizer", "false"]  # fmt: skip

# What the state that leaves the GPU is made of: one or several optimizers, frozen weights, masters inside of Adam.
OFFLOADED = {
    "full": ("dense", "full", ["--beta", "0.1"]),
    "lora": ("dense", "lora", ["--beta", "0.1", "--tensor_model_parallel_size", "2"]),
    "experts": ("moe", "full", ["--beta", "0.1", "--expert_model_parallel_size", "2", "--use_precision_aware_optimizer",
                                "true"]),
}  # fmt: skip


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
    for kind in ("dense", "moe"):
        make_model(ranks.model(kind), kind)
    for (kind, tuner), layouts in LAYOUTS.items():
        flags = make_flags(ranks, kind, tuner, "float32")
        if tuner == "lora":
            adapter = str(folder / f"{kind}-adapter")
            tasks[1].append(task("swift_megatron_grpo.tools.check_layouts:make_adapter", flags=flags, adapter=adapter))
            flags = [*flags, "--adapters", adapter]
        Path(ranks.layouts(kind, tuner)).mkdir()
        job = {"flags": flags, "batches": ["on-policy", "off-policy"], "folder": ranks.layouts(kind, tuner)}
        for number, found in layout_tasks(job, ["one", *layouts]).items():
            tasks[number] += found
    for kind in ("dense", "moe"):
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
        tasks[Variant.parse(name).ranks].append(task("tests.dist.every_loss:main", **arguments))
    for kind, layout in (("dense", ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
                         ("moe", ["--expert_model_parallel_size", "2"])):  # fmt: skip
        flags = make_flags(ranks, kind, "lora", "bfloat16", layout)
        tasks[2].append(task("tests.dist.lora_export:main", out=str(folder / f"export-{kind}"), kind=kind, flags=flags))
    for number, found in head_tasks(ranks).items():
        tasks[number] += found
    flags = make_flags(ranks, "dense", "full", "bfloat16", ["--tensor_model_parallel_size", "2"])
    tasks[2].append(task("tests.dist.engine_faults:main", out=str(folder / "faults"), flags=flags))
    tasks[1] += engine_tasks(ranks, "golden", [])
    tasks[1] += engine_tasks(ranks, "quiet", [])
    for kind in ("dense", "moe"):
        make_model(ranks.model(f"{kind}-for-gpus"), kind, SIZE_FOR_GPUS)
        tasks[1] += engine_tasks(ranks, "one_step", [], name=f"{kind}-step", kind=f"{kind}-for-gpus")
    two = ["--pipeline_model_parallel_size", "2", "--virtual_pipeline_model_parallel_size", "2"]
    others = [{"infer_max_tokens": 64}, {"infer_max_tokens": 400}, {"infer_micro_batch_size": 1},
              {"infer_micro_batch_size": 8}]  # fmt: skip
    tasks[1] += engine_tasks(ranks, "inference", [], others=others, name="inference-one")
    tasks[2] += engine_tasks(ranks, "inference", two, others=others)
    tasks[2] += engine_tasks(ranks, "odd_batches", ["--lr", "0"])
    for name, (kind, layout) in REFERENCE_LAYOUTS.items():
        tasks[2] += engine_tasks(ranks, "reference", ["--beta", "0.1", *layout.split()], name=name, kind=kind)
    for what, (kind, tuner, extra) in OFFLOADED.items():
        if tuner == "lora":
            extra = [*extra, "--adapters", str(folder / f"{kind}-adapter")]
        flags = make_flags(ranks, kind, tuner, "bfloat16", extra)
        tasks[2].append(task("tests.dist.offloading:main", out=str(folder / f"offload-{what}"), flags=flags))
    for number in sorted(tasks):
        last = task("tests.dist.engine_runs:threads", out=str(folder / f"threads-{number}"))
        launch(number, [*tasks[number], last], folder)
    return ranks


def engine_tasks(
    ranks: Ranks, run: str, extra: list[str], name: str | None = None, kind: str = "dense", **arguments: object
) -> list[Task]:
    flags = make_flags(ranks, kind, "full", "float32", extra)
    return [task(f"tests.dist.engine_runs:{run}", out=str(ranks.folder / (name or run)), flags=flags, **arguments)]


def head_tasks(ranks: Ranks) -> dict[int, list[dict[str, object]]]:
    """A weight that is also the embedding's, on several layouts; and the head's two paths on the same model."""
    make_model(ranks.model("tied"), "dense", ["--tie"])
    Path(ranks.layouts("tied", "full")).mkdir()
    jobs = [{"flags": make_flags(ranks, "tied", "full", "float32"), "folder": ranks.layouts("tied", "full")},
            {"flags": [*make_flags(ranks, "dense", "lora", "float32"), "--adapters", str(ranks.folder / "dense-adapter")],
             "folder": ranks.layouts("dense", "lora")}]  # fmt: skip
    batches = ["on-policy", "off-policy"]
    tasks = layout_tasks({**jobs[0], "batches": batches}, ["one", *TIED_LAYOUTS])
    tasks[1] += [task("tests.dist.generic_head:run_layout", batches=batches, **job) for job in jobs]
    return tasks


def make_flags(ranks: Ranks, kind: str, tuner: str, dtype: str, extra: list[str] | None = None) -> list[str]:
    model = str(ranks.model(kind))
    settings = argparse.Namespace(model=model, tuner=tuner, dtype=dtype, attention_backend="flash", extra=extra or [])
    return base_flags(settings, str(ranks.folder))
