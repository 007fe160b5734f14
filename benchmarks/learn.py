"""Train a released model on the same task with this package, ms-swift's own trainer, TRL and verl.

    python -m benchmarks.learn data --model MODEL --work FOLDER
    python -m benchmarks.learn run --arm ours --seed 1 --model MODEL --work FOLDER --out benchmarks/h200/parts
    python -m benchmarks.learn report

MODEL is the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes. `data` writes the task, which needs
reasoning-gym, and ends with 1 unless all trainers encode every prompt alike. `run` trains with one trainer, measures
the held-out accuracy before and after, and writes OUT/learn-ARM-SEED.json. `report` writes docs/learning.md and
docs/learning.svg from benchmarks/*/parts/learn-*.json. benchmarks/learn_chain.sh runs all of it on GPUs.
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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench import PACKAGES, PACKAGES_OF_PEERS, machine, revision
from benchmarks.harness.learning.page import write_page
from benchmarks.harness.learning.prompts import differing_prompts, read_rows, write_data
from benchmarks.harness.learning.settings import Paths, Settings, command_of
from benchmarks.harness.learning.steps import read_steps
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.processes import ALLOCATOR, allocator, exit_at_sigterm, kill, program, switch_of
from benchmarks.harness.results import ARMS

MODULES = "benchmarks.harness.learning"


def make_data(args: argparse.Namespace) -> int:
    write_data(args.work)
    rows = [row for name in ("train", "held_out") for row in read_rows(args.work / f"{name}.jsonl")]
    differing = differing_prompts(args.model, rows)
    print(f"learn: {len(rows)} prompts; {len(differing)} differ between ms-swift's chatml and the model's template")
    return 1 if differing else 0


def run(args: argparse.Namespace) -> int:
    exit_at_sigterm()
    settings, output = settings_of(args), args.work / f"{args.arm}-{args.seed}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    paths = Paths(args.model, args.work / "train.jsonl", output)
    command = [*program_of(args.arm, paths), *command_of(args.arm, settings, paths, args.seed), *args.flags]
    began = time.monotonic()
    code = finish(command, args.arm, output.with_suffix(".txt"), args.limit)
    seconds = round(time.monotonic() - began, 1)
    device, versions = machine(revision(), (*PACKAGES, *PACKAGES_OF_PEERS))
    series = read_steps(args.arm, output)
    result = {
        "arm": args.arm,
        "seed": args.seed,
        "settings": asdict(settings),
        "command": [text.replace(str(REPOSITORY), ".") for text in command],
        "device": device,
        "versions": versions,
        "exit_code": code,
        "seconds_of_process": seconds,
        "before": None,
        "after": None,
        **series,
    }
    file = args.out / f"learn-{args.arm}-{args.seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result) + "\n")  # now, because a session may end while the accuracy is measured
    result["before"] = accuracy(args, settings, args.model, args.work / "before.json")
    if code == 0:
        result["after"] = accuracy(args, settings, final_checkpoint(output), output / "after.json")
    file.write_text(json.dumps(result) + "\n")
    rewards = series["reward"]
    print(f"learn: {args.arm}, seed {args.seed}: exit code {code}, {len(rewards)} steps in {seconds} s; {file}")
    return 0 if code == 0 and len(rewards) == settings.steps else 1


def settings_of(args: argparse.Namespace) -> Settings:
    given = {name: getattr(args, name) for name in ("steps", "prompts", "generations", "dtype", "eager")}
    return Settings(**given, warm_up=min(Settings.warm_up, args.steps - 1))


def program_of(arm: str, paths: Paths) -> list[str]:
    if arm == "trl":
        return [sys.executable, "-m", f"{MODULES}.trl_arm"]
    if arm == "verl":
        return [sys.executable, "-m", f"{MODULES}.verl_arm", "--rows", str(paths.rows), "--output_dir",
                str(paths.output)]  # fmt: skip
    return [*program(), "rlhf"]


def finish(command: Sequence[str], arm: str, console: Path, limit: float) -> int | None:
    """Run a trainer and return its exit code, or None if it was ended at the limit."""
    import torch

    environment = environment_of_programs()
    environment["SWIFT_MEGATRON_GRPO"] = switch_of(arm, torch.cuda.is_available())
    if arm in ("ours", "stock"):
        environment[ALLOCATOR] = allocator()
    with console.open("wb") as file:
        process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)


def environment_of_programs() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "NPROC_PER_NODE": "1",
        "MASTER_PORT": str(random.randint(20000, 32000)),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
    }


def final_checkpoint(output: Path) -> Path:
    """Return the folder of the weights that a trainer saved at the end."""
    saved = sorted(output.rglob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    if not saved:
        raise SystemExit(f"learn: {output} has no weights as safetensors")
    return saved[-1].parent


def accuracy(args: argparse.Namespace, settings: Settings, model: Path, file: Path) -> dict[str, Any]:
    """Return the held-out accuracy of a model; that before training is measured once for all runs in a folder."""
    if not file.is_file():
        command = [sys.executable, "-m", f"{MODULES}.accuracy", str(model), "--base", str(args.model), "--rows",
                   str(args.work / "held_out.jsonl"), "--max-tokens", str(settings.completion_tokens), "--json",
                   str(file)]  # fmt: skip
        with file.with_suffix(".txt").open("wb") as log:
            subprocess.run(command, env=environment_of_programs(), cwd=REPOSITORY, check=True, stdout=log,
                           stderr=subprocess.STDOUT)  # fmt: skip
    measured: dict[str, Any] = json.loads(file.read_text())
    return measured


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write the page and its chart").set_defaults(call=lambda _: report())
    for name, call in (("data", make_data), ("run", run)):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(call=call)
        add = command.add_argument
        add("--model", type=Path, required=True, help="folder of the model before training")
        add("--work", type=Path, required=True, help="folder for the data and the outputs of runs")
    add("--arm", choices=ARMS, required=True)
    add("--seed", type=int, required=True)
    add("--out", type=Path, required=True, help="folder for the result")
    add("--limit", type=float, default=1500, help="seconds after which the training is ended")
    add("--steps", type=int, default=Settings.steps)
    add("--prompts", type=int, default=Settings.prompts, help="prompts of a step")
    add("--generations", type=int, default=Settings.generations, help="completions of a prompt")
    add("--dtype", choices=("bfloat16", "float32"), default=Settings.dtype)
    add("--eager", action="store_true", help="vLLM without CUDA graphs")
    add("flags", nargs="*", help="further flags of the trainer, after --")
    args = parser.parse_args(arguments)
    for name in {"model", "work", "out"} & set(vars(args)):
        setattr(args, name, getattr(args, name).resolve())
    return args


def report() -> int:
    write_page(REPOSITORY)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
