"""Run the recipes of templates/recipe.sh, and write their pages.

    python -m benchmarks.recipes run --recipe full --model MODEL --work WORK --out OUT [-- FLAG...]
    python -m benchmarks.recipes try --task spelling --model MODEL --work WORK --out OUT [-- FLAG...]
    python -m benchmarks.recipes wait --variant lockstep --old OLD --model MODEL --work WORK --out OUT
    python -m benchmarks.recipes plan --out OUT
    python -m benchmarks.recipes report

MODEL is the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes, and OUT is benchmarks/h200/parts. `run`
trains with one recipe, answers the held-out problems with plain vLLM on the weights that it saves, and writes
OUT/recipe-NAME.json. `try` does the same with another task, and writes OUT/recipe-try-TASK.json. `wait` trains with
the recipe `tool` in lockstep or with a slow tool, and writes OUT/recipe-wait-VARIANT.json; OLD is the package before
each conversation ran by itself (bench_waits.py has the command). `plan` writes what `--check true` plans for larger
models, which needs no GPU. `report` writes docs/recipes from the files of all folders.
benchmarks/recipes_chain.sh runs all of it on GPUs.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import exit_at_sigterm, run_until
from benchmarks.harness.recipes.known import RECIPES, TRIED_WITH, TRIES, WAITING, WAITS, Recipe
from benchmarks.harness.recipes.page import write_pages
from benchmarks.harness.recipes.plans import write_plans
from benchmarks.harness.recipes.runs import last_weights, logged, read_rows, write_programs
from benchmarks.learn import environment_of_programs

TEMPLATE = REPOSITORY / "templates" / "recipe.sh"
SLOW_CALCULATOR = REPOSITORY / "benchmarks" / "harness" / "recipes" / "slow_calculator.py"
LAST_LINES = 60  # of the log of a recipe that failed
PLUGINS = [str(TEMPLATE.parent / "plugins" / f"{name}.py") for name in ("reasoning_task", "calculator", "boxed_number")]


def run_recipe(args: argparse.Namespace) -> int:
    return run(args, RECIPES[args.recipe], args.recipe)


def try_task(args: argparse.Namespace) -> int:
    """Write the problems of another task where the recipe would write its own, and run it."""
    folder = args.work / f"try-{args.task}"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, PLUGINS[0], folder, *TRIES[args.task]], check=True)
    return run(args, RECIPES[TRIED_WITH], folder.name)


def wait(args: argparse.Namespace) -> int:
    """Run the recipe with a tool in a way in which its conversations wait."""
    variant = WAITS[args.variant]
    if variant.lockstep and not args.old:
        raise SystemExit(f"recipes: --variant {args.variant} needs --old, the folder of the package that trains")
    if args.old and not variant.lockstep:
        raise SystemExit(f"recipes: --variant {args.variant} takes no --old: this package trains")
    flags = ["--external_plugins", *PLUGINS, str(SLOW_CALCULATOR)] if variant.slow else []
    args.flags = [*flags, *args.flags]
    return run(args, RECIPES[WAITING], f"wait-{args.variant}", is_served=False, old=args.old)


def run(args: argparse.Namespace, recipe: Recipe, name: str, is_served: bool = True, old: Path | None = None) -> int:
    """Train, answer with the saved weights, write the result and remove the weights.

    `old`: a folder with another version of the package, which trains.
    """
    exit_at_sigterm()
    folder, result = args.work / name, args.out / f"recipe-{name}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        (folder / "model").symlink_to(args.model)
    began = time.monotonic()
    code = finish([str(TEMPLATE), recipe.name, str(folder), *args.flags], folder, args.limit, old)
    seconds = round(time.monotonic() - began, 1)
    gpus, (device, versions) = recipe.gpus * has_gpu(), machine(revision(), PACKAGES)
    solutions = Counter(row["solution"] for row in read_rows(folder / "held_out.jsonl"))
    measured: dict[str, Any] = {
        "recipe": recipe.name,
        "overridden": [flag.removeprefix(f"{REPOSITORY}/") for flag in args.flags],
        "device": device,
        "gpus": gpus,
        "versions": versions,
        "exit_code": code,
        "seconds_of_process": seconds,
        "gpu_hours": round(seconds * gpus / 3600, 4),
        "problems": solutions.total(),
        "constant": round(max(solutions.values(), default=0) / max(1, solutions.total()), 4),
        "served": None,
        **logged(folder / "output"),
    }
    result.write_text(json.dumps(measured) + "\n")  # now, because a rental may end while the weights are loaded
    weights = last_weights(folder / "output", recipe.merged)
    if code == 0 and weights:
        if is_served:
            measured["served"] = serve(recipe, weights, folder, args, measured["settings"])
            result.write_text(json.dumps(measured) + "\n")
        for saved in (folder / "output").glob("checkpoint-*"):
            shutil.rmtree(saved)
    if code != 0:
        print("\n".join(folder.with_suffix(".txt").read_text(errors="replace").splitlines()[-LAST_LINES:]))
    print(f"recipes: {name}: exit code {code}, {len(measured['reward'])} steps in {seconds} s; {result}")
    return 0 if measured["served"] or (code == 0 and not is_served) else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def finish(command: Sequence[str], folder: Path, limit: float, old: Path | None = None) -> int | None:
    """Run a recipe and return its exit code, or None if it was ended at the limit."""
    environment = environment_of(folder)
    if old is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(old), environment["PYTHONPATH"]])
    environment["SERVER"] = f"http://127.0.0.1:{random.randint(20000, 32000)}"
    return run_until(command, environment, folder.with_suffix(".txt"), limit)


def serve(recipe: Recipe, weights: Path, folder: Path, args: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """Return what plain vLLM measures with the saved weights and those before training; None if it fails."""
    file = folder / "served.json"
    dtype = str(settings["torch_dtype"]).removeprefix("torch.")
    command = [sys.executable, "-m", "benchmarks.harness.recipes.served", str(weights), str(args.model), "--rows",
               str(folder / "held_out.jsonl"), "--reward", recipe.reward,
               "--plugins", *PLUGINS, "--max-tokens", str(settings["max_completion_length"]), "--dtype", dtype,
               "--json", str(file)]  # fmt: skip
    command += ["--environment", "calculator"] if recipe.environment else []
    command += ["--problems", str(args.problems)] if args.problems else []
    with file.with_suffix(".txt").open("wb") as log:
        code = subprocess.run(command, env=environment_of(folder), cwd=REPOSITORY, stdout=log,
                              stderr=subprocess.STDOUT).returncode  # fmt: skip
    return json.loads(file.read_text()) if code == 0 else None


def environment_of(folder: Path) -> dict[str, str]:
    programs = write_programs(folder / "programs")
    return environment_of_programs() | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write the pages").set_defaults(call=lambda _: write_pages(REPOSITORY))
    plan = commands.add_parser("plan", help="plan larger models")
    plan.set_defaults(call=lambda args: write_plans(args.out))
    for name, call, option, choices in (
        ("run", run_recipe, "--recipe", RECIPES),
        ("try", try_task, "--task", TRIES),
        ("wait", wait, "--variant", WAITS),
    ):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(call=call)
        add = command.add_argument
        add(option, choices=choices, required=True)
        add("--model", type=absolute, required=True, help="folder of the model before training")
        add("--work", type=absolute, required=True, help="folder for the data and the outputs of runs")
        add("--out", type=absolute, required=True, help="folder for results")
        add("--limit", type=float, default=1500, help="seconds after which the training is ended")
        add("--problems", type=int, help="held-out problems that the saved weights answer; all if not given")
        if call is wait:
            add("--old", type=absolute, help="folder with an older swift_megatron_grpo, of variants in lockstep")
        add("flags", nargs="*", help="flags of the trainer that override those of the recipe")
    plan.add_argument("--out", type=absolute, required=True, help="folder for results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
