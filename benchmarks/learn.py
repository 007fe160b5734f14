"""Train a released model on the same task with this package, ms-swift's own trainer, TRL and verl.

    python -m benchmarks.learn data --model MODEL --work WORK
    python -m benchmarks.learn try --learning-rate 1e-5 --generations 8 --model MODEL --work WORK --out OUT
    python -m benchmarks.learn choose --out OUT
    python -m benchmarks.learn run --arm ours --seed 1 --model MODEL --work WORK --out OUT
    python -m benchmarks.learn time --arm ours --seed 1 --model MODEL --work WORK --out OUT
    python -m benchmarks.learn report

MODEL is the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes, and OUT is benchmarks/h200/parts. `data`
writes the task and other problems for the choice, and ends with 1 unless all trainers encode every prompt alike. `try`
trains with this package on the other problems and writes OUT/learning-try-RATE-GROUP.json. `choose` writes the best
candidate to OUT/learning-choice.json, which `run` and `time` read. `run` trains with one trainer, measures the held-out
accuracy of the weights that it saves, and writes OUT/learn-ARM-SEED.json; several runs may share a GPU. `time` trains
for fewer steps, with the GPU for itself, and writes OUT/learning-time-ARM-SEED.json. `report` writes docs/learning.md,
its chart and its lines in README.md from the files of all folders. benchmarks/learn_chain.sh runs all of it on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import PACKAGES, PACKAGES_OF_PEERS, machine, revision
from benchmarks.harness.learning.bands import is_complete
from benchmarks.harness.learning.page import write_page
from benchmarks.harness.learning.prompts import SEARCH, TASK, differing_prompts, read_rows, write_data
from benchmarks.harness.learning.search import (
    CHOICE,
    CHOSEN,
    GROUPS,
    LEARNING_RATES,
    SAVE_EVERY,
    SEED,
    STEPS,
    TIMED_STEPS,
    choose,
)
from benchmarks.harness.learning.settings import Paths, Settings, command_of
from benchmarks.harness.learning.steps import checkpoints, read_steps
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import ALLOCATOR, allocator, exit_at_sigterm, program, run_until, switch_of
from benchmarks.harness.results import ARMS

MODULES = "benchmarks.harness.learning"
FOR_CHOICE = "choice"  # folder in --work, with the problems for the choice
# Steps, and after how many of them weights are saved, by the command; a timed run saves nothing but its last.
STEPS_OF = {
    "try": (STEPS, SAVE_EVERY),
    "run": (Settings.steps, Settings.save_every),
    "time": (TIMED_STEPS, TIMED_STEPS),
}
MICRO_BATCHES = 4  # of TRL, where runs share a GPU: with one it takes a third of the memory


def make_data(args: argparse.Namespace) -> int:
    rows = []
    for folder, problems in ((args.work, TASK), (args.work / FOR_CHOICE, SEARCH)):
        write_data(folder, problems)
        rows += [row for name in ("train", "held_out") for row in read_rows(folder / f"{name}.jsonl")]
    differing = differing_prompts(args.model, rows)
    print(f"learn: {len(rows)} prompts; {len(differing)} differ between ms-swift's chatml and the model's template")
    return 1 if differing else 0


@dataclass(frozen=True)
class Job:
    """One training of one trainer."""

    arm: str
    seed: int
    settings: Settings
    model: Path
    data: Path  # folder with train.jsonl and held_out.jsonl
    output: Path
    result: Path  # JSON
    limit: float  # seconds
    is_timed: bool = False  # has the GPU for itself, and saves nothing
    flags: tuple[str, ...] = ()  # that override those of the settings
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to that of all programs


def try_candidate(args: argparse.Namespace) -> int:
    """Train with a candidate for learning rate and group size, next to others on the same GPU."""
    name = f"try-{args.learning_rate:g}-{args.generations}"
    settings = settings_of(args, {field: getattr(args, field) for field in CHOSEN})
    data, result = args.work / FOR_CHOICE, args.out / f"learning-{name}.json"
    return train(Job("ours", SEED, settings, args.model, data, args.work / name, result, args.limit))


def write_choice(args: argparse.Namespace) -> int:
    files = [args.out / f"learning-try-{rate:g}-{size}.json" for rate in LEARNING_RATES for size in GROUPS]
    runs = [json.loads(file.read_text()) for file in files if file.is_file()]
    complete = [run for run in runs if is_complete(run)]
    print(f"learn: {len(complete)} of {len(files)} candidates were measured")
    if complete:
        (args.out / CHOICE).write_text(json.dumps(choose(complete), indent=1) + "\n")
    return 0 if len(complete) == len(files) else 1


def run(args: argparse.Namespace) -> int:
    return train(job_of(args, f"{args.arm}-{args.seed}", "learn", is_timed=False))


def time_steps(args: argparse.Namespace) -> int:
    return train(job_of(args, f"time-{args.arm}-{args.seed}", "learning", is_timed=True))


def job_of(args: argparse.Namespace, name: str, kind: str, *, is_timed: bool) -> Job:
    chosen = {name: getattr(args, name) for name in CHOSEN}
    if None in chosen.values():
        file = args.out / CHOICE
        if not file.is_file():
            raise SystemExit(f"learn: {file} is missing; run `learn choose`, or give --learning-rate and --generations")
        choice = json.loads(file.read_text())
        chosen = {name: choice[name] for name in CHOSEN}
    output, result = args.work / name, args.out / f"{kind}-{name}.json"
    settings = settings_of(args, chosen)
    return Job(args.arm, args.seed, settings, args.model, args.work, output, result, args.limit, is_timed)


def settings_of(args: argparse.Namespace, chosen: dict[str, Any]) -> Settings:
    given = {name: getattr(args, name) for name in ("steps", "save_every", "completions", "dtype", "eager")}
    return Settings(**given, **chosen, warm_up=min(Settings.warm_up, args.steps - 1))


def train(job: Job) -> int:
    """Train, measure the accuracy of the weights, write the result and remove the weights."""
    exit_at_sigterm()
    shutil.rmtree(job.output, ignore_errors=True)
    job.output.mkdir(parents=True)
    paths = Paths(job.model, job.data / "train.jsonl", job.output)
    flags = command_of(job.arm, job.settings, paths, job.seed, 1 if job.is_timed else MICRO_BATCHES)
    command = [*program_of(job.arm, paths), *flags, *job.flags]
    began = time.monotonic()
    code = finish(command, job.arm, job.output.with_suffix(".txt"), job.limit, job.environment)
    seconds = round(time.monotonic() - began, 1)
    device, versions = machine(revision(), (*PACKAGES, *PACKAGES_OF_PEERS))
    series = read_steps(job.arm, job.output, job.settings.save_every)
    result: dict[str, Any] = {
        "arm": job.arm,
        "seed": job.seed,
        "settings": asdict(job.settings),
        "device": device,
        "versions": versions,
        "exit_code": code,
        "seconds_of_process": seconds,
        "held_out": [],
        **series,
    }
    job.result.parent.mkdir(parents=True, exist_ok=True)
    job.result.write_text(json.dumps(result) + "\n")  # now, because a rental may end while the accuracy is measured
    if job.is_timed:
        shutil.rmtree(job.output)
    elif code == 0:
        result["held_out"] = measure(job)
        job.result.write_text(json.dumps(result) + "\n")
    print(f"learn: {job.output.name}: exit code {code}, {len(series['reward'])} steps in {seconds} s; {job.result}")
    return 0 if (code == 0 if job.is_timed else is_complete(result)) else 1


def measure(job: Job) -> list[dict[str, Any]]:
    """Return the held-out accuracy of the model before training and of the weights that were saved; remove them."""
    saved, file = checkpoints(job.output), job.output / "accuracy.json"
    command = [sys.executable, "-m", f"{MODULES}.accuracy", str(job.model), *map(str, saved.values()), "--rows",
               str(job.data / "held_out.jsonl"), "--max-tokens", str(job.settings.completion_tokens), "--dtype",
               job.settings.dtype, "--json", str(file)]  # fmt: skip
    with file.with_suffix(".txt").open("wb") as log:
        subprocess.run(command, env=environment_of_programs(), cwd=REPOSITORY, check=True, stdout=log,
                       stderr=subprocess.STDOUT)  # fmt: skip
    for folder in saved.values():
        shutil.rmtree(folder)
    results = json.loads(file.read_text())
    return [{"step": step, **result} for step, result in zip([0, *saved], results, strict=True)]


def program_of(arm: str, paths: Paths) -> list[str]:
    if arm == "trl":
        return [sys.executable, "-m", f"{MODULES}.trl_arm"]
    if arm == "verl":
        return [sys.executable, "-m", f"{MODULES}.verl_arm", "--rows", str(paths.rows), "--output_dir",
                str(paths.output)]  # fmt: skip
    return [*program(), "rlhf"]


def finish(command: Sequence[str], arm: str, console: Path, limit: float, changed: Mapping[str, str]) -> int | None:
    """Run a trainer and return its exit code, or None if it was ended at the limit. `changed`: of its environment."""
    import torch

    environment = {**environment_of_programs(), **changed}
    environment["SWIFT_MEGATRON_GRPO"] = switch_of(arm, torch.cuda.is_available())
    if arm in ("ours", "stock"):
        environment[ALLOCATOR] = allocator()
    return run_until(command, environment, console, limit)


def environment_of_programs() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "NPROC_PER_NODE": "1",
        "MASTER_PORT": str(random.randint(20000, 32000)),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write the page and its chart").set_defaults(call=lambda _: report())
    calls = {"data": make_data, "try": try_candidate, "choose": write_choice, "run": run, "time": time_steps}
    for name, call in calls.items():
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(call=call)
        add = command.add_argument
        if name != "choose":
            add("--model", type=absolute, required=True, help="folder of the model before training")
            add("--work", type=absolute, required=True, help="folder for the data and the outputs of runs")
        if name != "data":
            add("--out", type=absolute, required=True, help="folder for results")
        if name in STEPS_OF:
            _add_options(add, name)
    return parser.parse_args(arguments)


def _add_options(add: Callable[..., Any], command: str) -> None:
    steps, save_every = STEPS_OF[command]
    tries = command == "try"
    if not tries:
        add("--arm", choices=ARMS, required=True)
        add("--seed", type=int, required=True)
    chosen = "" if tries else "; if not given, that of the choice"
    add("--learning-rate", type=float, required=tries, help=f"peak{chosen}")
    add("--generations", type=int, required=tries, help=f"completions of a prompt{chosen}")
    add("--limit", type=float, default=1500, help="seconds after which the training is ended")
    add("--steps", type=int, default=steps)
    add("--save-every", type=int, default=save_every, help="steps")
    add("--completions", type=int, default=Settings.completions, help="completions of a step")
    add("--dtype", choices=("bfloat16", "float32"), default=Settings.dtype)
    add("--eager", action="store_true", help="vLLM without CUDA graphs")


def report() -> int:
    write_page(REPOSITORY)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
