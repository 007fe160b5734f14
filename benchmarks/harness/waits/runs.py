"""Start the runs of a case, and read what each of them measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_server import free_port
from benchmarks.harness.learning.settings import Paths, Settings
from benchmarks.harness.learning.steps import FILES
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.processes import devices_locked, kill, visible_devices
from benchmarks.learn import environment_of_programs, finish, program_of

from .cases import REMEDIES, Case, Variant, steps_of
from .commands import server_flags, trainer_flags

TIMES = "time/"
METRICS = (TIMES, "rollout/staleness", "rollout/several_weights", "dynamic_sample/", "completions/")  # beginnings
MOST = ("rollout/staleness_max", "completions/max_length")  # of which the largest counts


@dataclass(frozen=True)
class Place:
    """Paths and limits of the runs of a case."""

    model: Path
    rows: Path
    work: Path
    old: Path | None  # a checkout of this package
    shape: str  # of a model with random weights
    limit: float  # seconds of a run


def measure(case: Case, variant: Variant, settings: Settings, place: Place, name: str) -> dict[str, Any]:
    """Run a variant of a case, and return its settings and what it measured."""
    output = place.work / name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    settings = _with_steps(settings, steps_of(case, variant))
    paths = Paths(place.model, place.rows, output)
    serving = served(case, settings, place, output) if REMEDIES[case.remedy].served else nullcontext("")
    # TRL does not load the plugin by which the others wait for their turn.
    alone = devices_locked() if variant.arm == "trl" else nullcontext()
    began = time.monotonic()
    with serving as url, alone:
        flags = trainer_flags(case, variant, settings, paths, place.shape, url)
        environment = environment_of(variant, place.old, bool(url))
        command = [*program_of(variant.arm, paths), *flags]
        code = finish(command, variant.arm, output.with_suffix(".txt"), place.limit, environment)
    result = {"exit_code": code, "seconds_of_process": round(time.monotonic() - began, 1), "flags": variant.flags}
    return result | read(case, variant, output)


def _with_steps(settings: Settings, steps: int) -> Settings:
    return Settings(**{**vars(settings), "steps": steps})


def environment_of(variant: Variant, old: Path | None, served: bool) -> dict[str, str]:
    """Return what a trainer's environment has in addition: the first GPU if a server has the last, an older package."""
    changed = {}
    if served and torch.cuda.is_available():
        changed["CUDA_VISIBLE_DEVICES"] = visible_devices()[0]
    if variant.old:
        changed["PYTHONPATH"] = os.pathsep.join([str(old), environment_of_programs()["PYTHONPATH"]])
    return changed


@contextmanager
def served(case: Case, settings: Settings, place: Place, output: Path, shares_gpu: bool = False) -> Iterator[str]:
    """Yield the address of a rollout server on the last GPU, which the trainer waits for."""
    port = free_port()
    flags = server_flags(case, settings, place.model, place.shape, port, shares_gpu)
    environment = {**environment_of_programs(), "SWIFT_MEGATRON_GRPO": "on"}
    if torch.cuda.is_available():
        if len(visible_devices()) < 2:
            raise SystemExit("bench_waits: a server needs a GPU besides the trainer's; use two in CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices()[-1]
    with (output / "server.txt").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-P", "-m", "swift.cli.rollout", *flags], env=environment,
                                  cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill(server)


def read(case: Case, variant: Variant, output: Path) -> dict[str, Any]:
    """Return the seconds of a run's steps, their mean, and the means of its metrics over the steps that count."""
    steps = steps_of(case, variant)
    counted = slice(case.warm_up, steps - case.cool_down)
    file = output / FILES[variant.arm]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rows = [row for row in rows if "learning_rate" in row]  # not the summary at the end
    seconds = [row["seconds"] if variant.arm == "trl" else end_of(row) for row in rows]
    result: dict[str, Any] = {"seconds": [round(second, 3) for second in seconds], "step": None}
    if len(seconds) == steps:
        ends = seconds[case.warm_up - 1 : steps - case.cool_down]
        result["step"] = round((ends[-1] - ends[0]) / (len(ends) - 1), 4)
    names = sorted({name for row in rows[counted] for name in row if name.startswith(METRICS)})
    return result | {"metrics": {name: round(metric(name, rows[counted]), 4) for name in names}}


def end_of(row: dict[str, Any]) -> float:
    """Return the seconds from the first step's beginning to the end of a step."""
    return float(row["train_speed(s/it)"]) * int(row["iteration"].split("/")[0])


def metric(name: str, rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean of a metric, or its maximum. A step without a rollout has only times of its own."""
    values = [float(row[name]) for row in rows if name in row]
    if name in MOST:
        return max(values)
    return sum(values) / (len(rows) if name.startswith(TIMES) else len(values))
