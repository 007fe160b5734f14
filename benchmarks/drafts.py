"""Train and generate with drafts (`--speculative_rollouts history`) and without, for docs/speculation.md.

    python -m benchmarks.drafts run --task sums --mode history --dtype bfloat16 --model MODEL --work WORK --out OUT
    python -m benchmarks.drafts generate --shape 8b --requests 64 --work WORK --out OUT
    python -m benchmarks.drafts report

MODEL is the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes, and OUT is benchmarks/h200/parts. `run`
trains with the recipe `full` of templates/recipe.sh on one of three tasks, and writes OUT/drafts-TASK-DTYPE-MODE.json:
rewards, seconds and counts of drafts step by step, and a digest of the tokens of each rollout. `again` is `off` once
more: how far do runs without drafts repeat themselves? `generate` times random weights that generate completions of
lognormal lengths with drafts and without, in turns. Requests copy earlier texts, so that drafts are accepted as often
as in the last rollouts of the runs in OUT, or as --accepted says. It writes OUT/drafts-SHAPE-REQUESTS.json. `report`
writes the tables of docs/speculation.md. benchmarks/drafts_chain.sh runs all of it on GPUs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.bench_server import InProcess, running
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.drafts.engine import Texts
from benchmarks.harness.drafts.page import write_page
from benchmarks.harness.drafts.runs import (
    DEPTH,
    MODES,
    PROMPTS,
    TASKS,
    Task,
    flags_of,
    late_acceptance,
    name_of,
    read_run,
)
from benchmarks.harness.drafts.texts import Sizes, probability_of
from benchmarks.harness.free_gpus import wait_until_free
from benchmarks.harness.generation_arms import GenerationJob
from benchmarks.harness.learning.settings import CACHE
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import devices_locked, exit_at_sigterm, visible_devices
from benchmarks.harness.recipes.runs import read_rows
from benchmarks.harness.shapes import SHAPES
from benchmarks.recipes import LAST_LINES, PLUGINS, TEMPLATE, finish, has_gpu

HELD_OUT = 8  # problems: every run ends with an evaluation
ENGINE = "benchmarks.harness.drafts.engine"
ROOM = 64  # tokens of an engine behind the longest completion
CACHE_BYTES = {"8b": 36_000_000_000, "toy": 2**26}  # the first: 240,000 tokens, more than 128 requests have on average


def run(args: argparse.Namespace) -> int:
    """Train on a task, and write what the run has logged and dumped."""
    exit_at_sigterm()
    task, name = TASKS[args.task], name_of(args.task, args.dtype, args.mode)
    folder, result = args.work / name, args.out / f"drafts-{name}.json"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (folder / "model").symlink_to(args.model)
    write_problems(task, folder)
    flags = flags_of(task, args.mode, args.dtype, has_gpu(), args.steps, args.completions, folder / "dump")
    began = time.monotonic()
    code = finish([str(TEMPLATE), "full", str(folder), *flags, *args.flags], folder, args.limit)
    seconds = round(time.monotonic() - began, 1)
    device, versions = machine(revision(), PACKAGES)
    measured: dict[str, Any] = {
        "task": args.task, "mode": args.mode, "dtype": args.dtype, "steps": args.steps, "completions": args.completions,
        "overridden": args.flags, "device": device, "versions": versions, "exit_code": code,
        "seconds_of_process": seconds, **read_run(folder / "output", folder / "dump"),
    }  # fmt: skip
    result.write_text(json.dumps(measured) + "\n")
    if code != 0:
        print("\n".join(folder.with_suffix(".txt").read_text(errors="replace").splitlines()[-LAST_LINES:]))
    else:
        shutil.rmtree(folder)
    print(f"drafts: {name}: exit code {code}, {len(measured['reward'])} steps in {seconds} s; {result}")
    return 0 if code == 0 else 1


def write_problems(task: Task, folder: Path) -> None:
    """Write few problems, which a run sees several times. They are evenly chosen, because easy ones come first."""
    subprocess.run([sys.executable, PLUGINS[0], folder, task.name, task.settings, task.instruction], check=True)
    for name, most in (("train", PROMPTS), ("held_out", HELD_OUT)):
        file = folder / f"{name}.jsonl"
        rows = read_rows(file)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:: len(rows) // most][:most]))


def generate(args: argparse.Namespace) -> int:
    """Time an engine with drafts and one without, in turns. Both are on the GPU, and one of them generates."""
    exit_at_sigterm()
    accepted = late_acceptance(args.out) if args.accepted is None else args.accepted
    if accepted is None:
        raise SystemExit(f"drafts: {args.out} has no run with drafts in bfloat16; run it first, or give --accepted")
    sizes = Sizes(args.requests, args.group_size, args.prompt_tokens, args.lengths, SHAPES[args.shape].vocabulary)
    texts = Texts(sizes, probability_of(accepted, DEPTH, sizes))
    work = args.work / f"{args.shape}-{args.requests}"
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model, job, result = made_checkpoint(args.work, args.shape, with_weights=False), job_of(args), args.out / part(args)
    device, versions = machine(revision(), PACKAGES)
    rounds: dict[str, list[dict[str, Any]]] = {"off": [], "history": []}
    with devices_locked(), ExitStack() as stack:
        if has_gpu():
            wait_until_free(visible_devices()[:1])
        started = {}
        for name, drafts in (("off", 0), ("history", DEPTH)):
            command = ["-m", ENGINE, str(model), json.dumps(asdict(replace(job, drafts=drafts))), texts.as_json()]
            started[name] = stack.enter_context(running(command, work / f"{name}.log", pipes=True))
        arms = {name: InProcess(process, work / f"{name}.log") for name, process in started.items()}
        for number in range(args.rounds + 1):
            for name in arms if number % 2 else reversed(arms):
                measured = arms[name].generate(number)
                print(f"drafts: {args.shape}, {args.requests} requests, round {number}, {name}: "
                      f"{measured['seconds']:.2f} s", flush=True)  # fmt: skip
                if number:
                    rounds[name].append(measured)
            whole = {"shape": args.shape, **asdict(sizes), "accepted": accepted, "right": texts.right,
                     "device": device, "versions": versions, "job": asdict(job), "rounds": rounds}  # fmt: skip
            result.write_text(json.dumps(whole) + "\n")
    return 0


def part(args: argparse.Namespace) -> str:
    return f"drafts-{args.shape}-{args.requests}.json"


def job_of(args: argparse.Namespace) -> GenerationJob:
    gpu, longest = has_gpu(), int(args.lengths.split(":")[-1])
    return GenerationJob(
        prompts=args.requests // args.group_size, group_size=args.group_size, prompt_characters=args.prompt_tokens,
        tokens=longest, max_model_len=args.prompt_tokens + longest + ROOM, max_num_seqs=args.requests,
        memory_share=0.45 if gpu else 0.2, dtype="bfloat16" if gpu else "float32", eager=not gpu,
        engine_kwargs={"load_format": "dummy", CACHE: CACHE_BYTES[args.shape]},
    )  # fmt: skip


def report(args: argparse.Namespace) -> int:
    write_page(REPOSITORY)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write the tables").set_defaults(call=report)
    for name, call in (("run", run), ("generate", generate)):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(call=call)
        add = command.add_argument
        add("--work", type=absolute, required=True, help="folder for models, data and the outputs of runs")
        add("--out", type=absolute, required=True, help="folder for results")
        if name == "run":
            add("--task", choices=TASKS, required=True)
            add("--mode", choices=MODES, required=True)
            add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
            add("--model", type=absolute, required=True, help="folder of SmolLM2")
            add("--steps", type=int, default=200)
            add("--completions", type=int, default=64, help="completions of a step, 8 of each prompt")
            add("--limit", type=float, default=900, help="seconds after which the training is ended")
            add("flags", nargs="*", help="flags of the trainer that override those of the recipe")
        else:
            add("--shape", choices=CACHE_BYTES, default="8b", help="sizes of the model")
            add("--requests", type=int, required=True, help="requests of a round, which begin together")
            add("--group-size", type=int, default=8, help="requests of a prompt")
            add("--prompt-tokens", type=int, default=256)
            add("--lengths", default="lognormal:700:0.9:4096", help="tokens of completions")
            add("--accepted", type=float, help=f"drafts that a step accepts where a request has {DEPTH}; if not "
                "given, what the runs in --out accept late")  # fmt: skip
            add("--rounds", type=int, default=3, help="measured rounds of each engine")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
