"""Train short steps with several checkouts of this package in turns, and print how long each phase takes.

    python -m benchmarks.bench_short_steps --model MODEL --work WORK --checkouts OLD . --json runs/short-steps.json

The settings are those of `benchmarks.learn`: 256 completions of at most 64 tokens, vLLM awake in the trainer. MODEL is
the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes. Arguments after -- are flags of the run, so that a
checkout is also compared with itself: `--checkouts . -- --sync_check full`. `git archive COMMIT | tar x -C OLD` writes
a checkout. Numbers are medians, in milliseconds; `other` is what no phase measures, and `rewards` shows whether the
checkouts trained the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.learning.prompts import TASK, write_data
from benchmarks.harness.learning.settings import Paths, Settings, command_of
from benchmarks.harness.paths import absolute
from benchmarks.harness.processes import program
from benchmarks.learn import environment_of_programs

WARM_UP = 5  # steps that are not counted


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=absolute, required=True)
    parser.add_argument("--work", type=absolute, required=True, help="folder for the data and the outputs of runs")
    parser.add_argument("--checkouts", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=absolute, required=True, help="file for the results")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each checkout")
    parser.add_argument("flags", nargs="*", help="of the run, after --")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    write_data(args.work, TASK)
    settings = Settings(steps=args.steps, save_every=10 * args.steps, warm_up=1)
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for checkout in args.checkouts:
            output = args.work / f"{checkout.resolve().name}-{number}"
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            paths = Paths(args.model, args.work / "train.jsonl", output)
            command = [*program(), "rlhf", *command_of("ours", settings, paths, seed=1), *args.flags]
            before = {**environment_of_programs(), "SWIFT_MEGATRON_GRPO": "on"}
            environment = {**before, "PYTHONPATH": os.pathsep.join((str(checkout.resolve()), before["PYTHONPATH"]))}
            with output.with_suffix(".txt").open("wb") as log:
                subprocess.run(command, env=environment, cwd=checkout, stdout=log, stderr=log, check=True)
            result = phases(output / "logging.jsonl")
            results.setdefault(str(checkout), []).append(result)
            print(checkout, number, json.dumps(result), flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    device, versions = machine(revision(), PACKAGES)
    measured = {"device": device, "versions": versions, "checkouts": results}
    args.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


def phases(log: Path) -> dict[str, Any]:
    """Return the milliseconds of a step and of its phases, medians, and the rewards of the first steps."""
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if "time/train" in row]
    ends = [float(row["train_speed(s/it)"]) * number for number, row in enumerate(rows, 1)]
    steps = [end - begin for begin, end in pairwise(ends)][WARM_UP - 1 :]
    counted = rows[WARM_UP:]
    names = sorted({name for row in counted for name in row if name.startswith("time/")})
    result: dict[str, Any] = {"step": round(1e3 * median(steps), 1)}
    for name in names:
        result[name.removeprefix("time/")] = round(1e3 * median(row.get(name, 0.0) for row in counted), 1)
    spent = (sum(row.get(name, 0.0) for name in names) for row in counted)
    result["other"] = round(1e3 * median(step - sum_ for step, sum_ in zip(steps, spent, strict=True)), 1)
    result["rewards"] = [row["reward"] for row in rows[:WARM_UP]]
    return result


if __name__ == "__main__":
    sys.exit(main())
