"""Ranks of tests/dist: each job runs when the first test requests its result, on ranks that a file's jobs share."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import DENSE, MOE, Task, Variant, base_flags, task
from tests.forking.client import fork_server
from tests.support.runs import SIZE_FOR_GPUS, make_model

TUNERS = ["full", "lora"]
LAYOUTS = {
    ("dense", "full"): [*DENSE, "dp2+ep2", "dp2+cpu_adam", "dp2+overlap_param", "pp2+last1", "pp2+uneven_vpp"],
    ("dense", "lora"): ["mbs1", "tokens64", "tp2+sp", "pp2+vpp2", "cp2", "dp2+overlap", "tp2+pp2"],
    ("moe", "full"): ["tokens64", *MOE, "dp2+ep2+cpu_adam", "tp2+sp+dp2+ep2+permute", "pp2+uneven_vpp"],
    ("moe", "lora"): ["mbs1", "tp2+sp", "dp2+ep2", "pp2+vpp2"],  # mcore-bridge does not support LoRA with ETP
}
# The trained model in one layout, its frozen reference copy in another.
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
LOSS_LAYOUTS = ["mbs8", "tp2+sp", "pp2", "cp2", "dp2", "dp4", "mbs8+shared"]
LEARNING_RATE = 1000.0
# One step of plain gradient descent: the change of a weight, divided by the learning rate, is its gradient. The rate is
# large so that subtracting fp32 weights costs no precision.
DESCENT = ["--optimizer", "sgd", "--sgd_momentum", "0", "--lr", str(LEARNING_RATE), "--lr_decay_style", "constant",
           "--clip_grad", "0", "--weight_decay", "0", "--use_distributed_optimizer", "false"]  # fmt: skip

# A layer of multi-token prediction learns.
LEARNS = ["--mtp_num_layers", "1", "--speculative_rollouts", "mtp", "--seed_completions", "true",
          "--vllm_enable_prefix_caching", "false", "--top_p", "1", "--top_k", "-1"]  # fmt: skip

# Kinds of offloaded state: one or several optimizers, frozen weights, fp32 master weights inside Adam.
OFFLOADED = {
    "full": ("dense-shallow", "full", ["--beta", "0.1"]),
    "lora": ("dense-shallow", "lora", ["--beta", "0.1", "--tensor_model_parallel_size", "2"]),
    "experts": ("moe-shallow", "full", ["--beta", "0.1", "--expert_model_parallel_size", "2",
                                        "--use_precision_aware_optimizer", "true"]),
    "drafts": ("qwen3_5", "full", ["--beta", "0.1", *LEARNS]),
}  # fmt: skip
_MODELS = {
    "dense": ("dense", []),
    "moe": ("moe", []),
    "dense-shallow": ("dense", ["--layers", "2"]),
    "moe-shallow": ("moe", ["--layers", "2"]),
    "tied": ("dense", ["--tie"]),
    "dense-for-gpus": ("dense", SIZE_FOR_GPUS),
    "moe-for-gpus": ("moe", SIZE_FOR_GPUS),
    "qwen3_5-tied": ("qwen3_5", ["--tie"]),
}
_BATCHES = ["on-policy", "off-policy"]
_RUN_IMAGES = "tests.programs.dist.image_runs:run_layout"
EVERYTHING = ["--freeze_vit", "false", "--freeze_aligner", "false", "--max_length", "256"]
RUN_LAYOUT = "swift_megatron_grpo.cli.check_layouts.ranks:run_layout"


class Crew:
    """Forked ranks that run one job after another: starting them takes longer than most jobs."""

    def __init__(self, ranks: int, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "log.txt"
        pipes = [folder / str(rank) for rank in (*range(ranks), "done")]
        for pipe in pipes:
            os.mkfifo(pipe)
        *self._jobs, self._done = (os.open(pipe, os.O_RDWR) for pipe in pipes)  # so that opening one never waits
        with self._log.open("w") as output:
            self._process = fork_server("trainer").start("tasks", [str(folder)], ranks, folder, output, {})

    def run(self, job: Path) -> str | None:
        """Return why a job has failed, which ends the ranks, or None."""
        for pipe in self._jobs:
            os.write(pipe, f"{job}\n".encode())
        for _ in self._jobs:
            readable, _, _ = select.select([self._done, self._process], [], [])
            if self._done not in readable:
                return f"exit code {self._process.wait()}:\n{self._log.read_text()[-6000:]}"
            os.read(self._done, 1)
        return None

    def end(self) -> None:
        for pipe in (*self._jobs, self._done):
            os.close(pipe)
        self._process.wait()


@dataclass(frozen=True)
class Ranks:
    """Runs each job once on forked ranks and reads its results."""

    folder: Path
    _failures: dict[str, str | None] = field(default_factory=dict)  # of the jobs that have run
    _crews: dict[int, Crew] = field(default_factory=dict)  # by number of ranks

    def run(self, name: str, ranks: int, tasks: Sequence[Task]) -> None:
        """Run tasks one after the other on this many ranks; a job that has run already is not repeated."""
        if name not in self._failures:
            job = self.folder / f"{name}.job.json"
            job.write_text(json.dumps(list(tasks)))
            if ranks not in self._crews:
                self._crews[ranks] = Crew(ranks, self.folder / f"{name}.ranks")
            self._failures[name] = self._crews[ranks].run(job)
            if self._failures[name] is not None:
                self._crews.pop(ranks).end()
        assert self._failures[name] is None, f"{name} on {ranks} ranks: {self._failures[name]}"

    def run_each(self, name: str, tasks: Mapping[int, Sequence[Task]]) -> None:
        """Run the tasks of each number of ranks."""
        for ranks, of_ranks in tasks.items():
            self.run(f"{name}-{ranks}", ranks, of_ranks)

    def end(self) -> None:
        """End all ranks; the next job starts others."""
        while self._crews:
            self._crews.popitem()[1].end()

    def report(self, name: str, rank: int) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / f"{name}.{rank}.json").read_text())
        return report

    def model(self, kind: str) -> Path:
        path = self.folder / f"{kind}-model"
        if not path.exists():
            make_model(path, *_MODELS.get(kind, (kind, ())))
        return path

    def adapter(self, kind: str) -> str:
        name = f"{kind}-adapter"
        flags = self.flags(kind, "lora", "float32")
        path = str(self.folder / name)
        self.run(name, 1, [task("swift_megatron_grpo.cli.check_layouts.ranks:make_adapter", flags=flags, adapter=path)])
        return path

    def flags(self, kind: str, tuner: str, dtype: str, extra: Sequence[str] = ()) -> list[str]:
        return base_flags(str(self.model(kind)), str(self.folder), tuner_type=tuner, torch_dtype=dtype, extra=extra)

    def layout_flags(self, kind: str, tuner: str) -> list[str]:
        flags = self.flags(kind, tuner, "float32")
        return [*flags, "--adapters", self.adapter(kind)] if tuner == "lora" else flags

    def layouts(self, kind: str, tuner: str, *names: str) -> str:
        """Run these layouts and one rank; return the folder with their results."""
        folder = self.folder / f"{kind}-{tuner}"
        folder.mkdir(exist_ok=True)
        for name in ("one", *names):
            self.run(f"{kind}-{tuner}-{name}", Variant.parse(name).ranks, [self.layout_task(kind, tuner, name)])
        return str(folder)

    def shared_layouts(self, kind: str, tuner: str, names: Sequence[str]) -> Path:
        """Run layouts that share prompts, and one rank that repeats them; return the folder."""
        folder = self.folder / f"{kind}-{tuner}-shared"
        folder.mkdir()
        flags, tasks = self.layout_flags(kind, tuner), dict[int, list[Task]]()
        for name in ("one", *names):
            arguments = {"name": name, "flags": flags, "folder": str(folder)}
            tasks.setdefault(Variant.parse(name).ranks, []).append(
                task("tests.programs.dist.shared_runs:run_layout", **arguments)
            )
        self.run_each(f"shared-{kind}-{tuner}", tasks)
        return folder

    def all_layouts(self, name: str, layouts: Mapping[tuple[str, str], Sequence[str]]) -> None:
        """Run the layouts of several kinds and tuners, and one rank for each, in one process per rank."""
        tasks: dict[int, list[Task]] = {}
        for (kind, tuner), names in layouts.items():
            (self.folder / f"{kind}-{tuner}").mkdir(exist_ok=True)
            for layout in ("one", *names):
                tasks.setdefault(Variant.parse(layout).ranks, []).append(self.layout_task(kind, tuner, layout))
                self._failures[f"{kind}-{tuner}-{layout}"] = None  # runs in the job below
        self.run_each(name, tasks)

    def layout_task(self, kind: str, tuner: str, name: str) -> Task:
        folder = str(self.folder / f"{kind}-{tuner}")
        return task(RUN_LAYOUT, name=name, flags=self.layout_flags(kind, tuner), batches=_BATCHES, folder=folder)

    def generic_head(self, kind: str, tuner: str) -> str:
        """Run one rank with the head's generic path, for logits that are not a plain product; return the folder."""
        folder = self.layouts(kind, tuner)
        arguments = {"flags": self.layout_flags(kind, tuner), "batches": _BATCHES, "folder": folder}
        self.run(f"{kind}-{tuner}-generic", 1, [task("tests.programs.dist.generic_head:run_layout", **arguments)])
        return folder

    def descent(self, kind: str) -> Path:
        """Run one rank, and with shared prompts another layout of it on samples of its own: mbs4+shared."""
        folder = self.folder / f"{kind}-descent"
        folder.mkdir(exist_ok=True)
        flags = self.flags(kind, "full", "float32", DESCENT)
        arguments = {"flags": flags, "batches": ["given"], "folder": str(folder)}
        tasks = [
            task(RUN_LAYOUT, name="one", **arguments),
            task(RUN_LAYOUT, name="mbs4+shared", **arguments, one_prompt=True),
        ]
        self.run(f"{kind}-descent", 1, tasks)
        return folder

    def descents(self, name: str, kinds: Sequence[str]) -> None:
        """Run `descent` for several kinds in one process."""
        tasks = []
        for kind in kinds:
            folder = self.folder / f"{kind}-descent"
            folder.mkdir()
            flags = self.flags(kind, "full", "float32", DESCENT)
            tasks.append(task(RUN_LAYOUT, name="one", flags=flags, batches=["given"], folder=str(folder)))
            self._failures[f"{kind}-descent"] = None  # runs in the job below
        self.run(name, 1, tasks)

    def image_layouts(self, layouts: Mapping[tuple[str, str], Sequence[str]], descents: Sequence[str]) -> None:
        """Run layouts and one rank on samples with images, and of some kinds a step of descent. All is trained."""
        tasks: dict[int, list[Task]] = {}
        for (kind, tuner), names in layouts.items():
            folder = self.folder / f"{kind}-{tuner}-images"
            (folder / "descent").mkdir(parents=True)
            flags = self.flags(kind, tuner, "float32", EVERYTHING)
            if tuner == "lora":  # with adapters in the vision tower, too
                adapter = str(folder / "adapter")
                make = "swift_megatron_grpo.cli.check_layouts.ranks:make_adapter"
                tasks.setdefault(1, []).append(task(make, flags=flags, adapter=adapter))
                flags = [*flags, "--adapters", adapter]
            for layout in ("one", *names) if names else ():
                arguments = {"name": layout, "flags": flags, "batches": _BATCHES, "folder": str(folder)}
                tasks.setdefault(Variant.parse(layout).ranks, []).append(task(_RUN_IMAGES, **arguments))
            if tuner == "full" and kind in descents:
                arguments = {"flags": [*flags, *DESCENT], "batches": ["given"], "folder": str(folder / "descent")}
                tasks.setdefault(1, []).append(task(_RUN_IMAGES, name="one", **arguments))
        self.run_each("images", tasks)

    def routing_layouts(self, layouts: Sequence[str], tuner: str) -> Path:
        """Run layouts on samples with a given routing; return the folder. An adapter is on the routers, too."""
        folder = self.folder / f"routing-{tuner}"
        folder.mkdir()
        flags, tasks = self.flags("moe", tuner, "float32"), dict[int, list[Task]]()
        if tuner == "lora":
            flags += ["--target_modules", "all-linear", "all-router"]
            adapter = str(folder / "adapter")
            make = task("swift_megatron_grpo.cli.check_layouts.ranks:make_adapter", flags=flags, adapter=adapter)
            tasks[1] = [make]
            flags = [*flags, "--adapters", adapter]
        for name in layouts:
            run = task("tests.programs.dist.routing_runs:run_layout", name=name, flags=flags, folder=str(folder))
            tasks.setdefault(Variant.parse(name).ranks, []).append(run)
        self.run_each(f"routing-{tuner}", tasks)
        return folder

    def losses(self, layout: str) -> dict[str, Any]:
        """Run one step of every loss on a layout and return its metrics."""
        no_update = ["--micro_batch_size", "4", "--lr", "1e-30", "--global_batch_size", "16"]
        flags, out = self.flags("dense-shallow", "full", "float32", no_update), str(self.folder / "losses")
        main = task("tests.programs.dist.every_loss:main", out=out, layout=layout, flags=flags)
        self.run(f"losses-{layout}", Variant.parse(layout).ranks, [main])
        report: dict[str, Any] = json.loads((self.folder / f"losses.{layout}.json").read_text())
        return report

    def engine(
        self, name: str, run: str, ranks: int, extra: Sequence[str] = (), kind: str = "dense", **more: Any
    ) -> None:
        """Run a function of engine_runs.py in fp32 and save its reports under `name`."""
        flags = self.flags(kind, "full", "float32", extra)
        call = task(f"tests.programs.dist.engine_runs:{run}", out=str(self.folder / name), flags=flags, **more)
        self.run(name, ranks, [call])

    def call(self, name: str, function: str, ranks: int, flags: Sequence[str], **more: Any) -> None:
        """Run a function of tests/programs/dist and save its reports under `name`."""
        out = str(self.folder / name)
        self.run(name, ranks, [task(f"tests.programs.dist.{function}", out=out, flags=list(flags), **more)])


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the cases of the file's selected tests with exactly these parameters, so that a fixture runs no others."""
    of_file = [item for item in request.session.items if item.path == request.path and "[" in item.name]
    cases = [item.callspec.params for item in of_file if isinstance(item, pytest.Function)]
    return list(dict.fromkeys(tuple(case[name] for name in names) for case in cases if case.keys() == set(names)))


def selected_layouts(request: pytest.FixtureRequest) -> dict[tuple[str, str], list[str]]:
    """Return the selected layouts by kind of model and tuner."""
    layouts: dict[tuple[str, str], list[str]] = {}
    for kind, tuner, layout in selected(request, "kind", "tuner", "layout"):
        layouts.setdefault((kind, tuner), []).append(layout)
    return layouts


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_the_file(ranks: Ranks) -> Iterator[None]:
    yield
    ranks.end()
