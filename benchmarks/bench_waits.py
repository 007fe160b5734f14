"""Measure what keeps rollouts from waiting: spare groups, several steps on one, free conversations, weights in flight.

    python -m benchmarks.bench_waits run --case spare-smollm2 --model MODEL --work WORK --out OUT
    python -m benchmarks.bench_waits run --case turns-smollm2 --old OLD --model MODEL --work WORK --out OUT
    python -m benchmarks.bench_waits learn --remedy flight --seed 1 --model MODEL --work WORK --out OUT
    python -m benchmarks.bench_waits report

MODEL is the folder that `swift-megatron-grpo get-model smollm2 MODEL` writes; cases of 8B make random weights in WORK.
OUT is benchmarks/h200/parts. `run` trains with each variant of a case in turns, --rounds times, and adds each run to
OUT/waits-CASE.json when it ends; what that file has is not measured again. OLD is the package as it was before
conversations ran by themselves: `git archive b6428e4b~1 swift_megatron_grpo | tar x -C OLD`. `learn` repeats a run of
`benchmarks.learn` with a remedy, and writes OUT/waits-learn-REMEDY-SEED.json; several may share a GPU. `report` writes
the tables of docs/async.md and docs/choosing_settings.md. benchmarks/waits_chain.sh runs all of it on GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.learning.prompts import TASK, write_data
from benchmarks.harness.learning.search import CHOICE, CHOSEN
from benchmarks.harness.learning.settings import Settings
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import exit_at_sigterm
from benchmarks.harness.waits.cases import CASES, CURVES, MODELS, REMEDIES, settings_of, small, variants_of
from benchmarks.harness.waits.page import write_pages
from benchmarks.harness.waits.rows import write_rows
from benchmarks.harness.waits.runs import Place, environment_of, measure, served
from benchmarks.learn import Job, train

LAST_LINES = 40  # of the log of a run that failed


def run_case(args: argparse.Namespace) -> int:
    """Measure what is missing in the file of a case."""
    exit_at_sigterm()
    case = small(CASES[args.case]) if args.dry else CASES[args.case]
    settings = small_settings(settings_of(case)) if args.dry else settings_of(case)
    place = place_of(args, settings)
    file: Path = args.out / f"waits-{args.case}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(file.read_text())["runs"] if file.is_file() else []
    device, versions = machine(revision(), PACKAGES)
    is_whole = True
    for number in range(args.rounds):
        for variant in variants_of(case):
            if args.variants and variant.name not in args.variants:
                continue
            found = [run for run in runs if (run["variant"], run["round"]) == (variant.name, number)]
            if any(run["step"] for run in found):
                continue
            if variant.old and place.old is None:
                raise SystemExit(f"bench_waits: {args.case} compares with an older package; give its folder by --old")
            name = f"{args.case}-{variant.name}-{number}"
            measured = {"variant": variant.name, "round": number, **measure(case, variant, settings, place, name)}
            runs = [run for run in runs if run not in found] + [measured]
            whole = {"case": asdict(case), "settings": asdict(settings), "device": device, "versions": versions}
            file.write_text(json.dumps(whole | {"runs": runs}) + "\n")
            if measured["step"] is None:
                is_whole = False
                log = (place.work / name).with_suffix(".txt").read_text(errors="replace")
                print("\n".join(log.splitlines()[-LAST_LINES:]))
            print(f"bench_waits: {name}: exit code {measured['exit_code']}, {measured['step']} s a step, "
                  f"{measured['seconds_of_process']} s in all; {file}", flush=True)  # fmt: skip
    return 0 if is_whole else 1


def small_settings(settings: Settings) -> Settings:
    return replace(settings, completions=8, generations=2, dtype="float32", eager=True)


def place_of(args: argparse.Namespace, settings: Settings) -> Place:
    """Make the model and the rows of a case."""
    case = CASES[args.case]
    model = MODELS[case.model]
    shape = "toy" if model.shape and args.dry else model.shape
    folder = made_checkpoint(args.work, shape, with_weights=False) if shape else args.model
    lengths = (small(case).lengths if args.dry else case.lengths or model.lengths) if shape else ""
    turns = REMEDIES[case.remedy].turns
    rows = write_rows(args.work / args.case, settings.prompt_tokens, lengths, settings.generations, turns)
    return Place(folder, rows, args.work, args.old, shape, args.limit)


def learn(args: argparse.Namespace) -> int:
    """Train as `benchmarks.learn run` does, with a remedy."""
    variant = next(each for each in REMEDIES[args.remedy].variants if each.name == args.remedy)
    case, chosen = CASES[f"{args.remedy}-smollm2"], json.loads((args.choice / CHOICE).read_text())
    settings = Settings(**{name: chosen[name] for name in CHOSEN})
    if args.dry:
        settings = replace(small_settings(settings), steps=4, save_every=2, warm_up=1)
    write_data(args.work, TASK)
    name = f"learn-{args.remedy}-{args.seed}"
    output = args.work / name
    place = Place(args.model, args.work / "train.jsonl", args.work, None, "", args.limit)
    logs = args.work / f"{name}-server"
    logs.mkdir(parents=True, exist_ok=True)
    remedy = REMEDIES[args.remedy]
    serving = served(case, settings, place, logs, shares_gpu=True) if remedy.served else nullcontext("")
    with serving as url:
        flags = [*remedy.common.split(), *variant.flags.split()]
        flags += ["--vllm_mode", "server", "--vllm_server_base_url", url] if url else []
        environment = environment_of(variant, None, bool(url))
        result: Path = args.out / f"waits-{name}.json"
        job = Job("ours", args.seed, settings, args.model, args.work, output, result, args.limit, flags=tuple(flags),
                  environment=environment)  # fmt: skip
        return train(job)


def report(args: argparse.Namespace) -> int:
    write_pages(REPOSITORY)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write the tables of both pages").set_defaults(call=report)
    for name, call in (("run", run_case), ("learn", learn)):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(call=call)
        add = command.add_argument
        add("--model", type=absolute, required=True, help="folder of SmolLM2")
        add("--work", type=absolute, required=True, help="folder for models, data and the outputs of runs")
        add("--out", type=absolute, required=True, help="folder for results")
        add("--limit", type=float, default=900, help="seconds after which a run is ended")
        add("--dry", action="store_true", help="few small steps of a small model, on a CPU")
        if name == "run":
            add("--case", choices=CASES, required=True)
            add("--variants", nargs="+", default=[], metavar="NAME", help="of the case; all if not given")
            add("--rounds", type=int, default=1, help="runs of each variant, with those of the file")
            add("--old", type=absolute, help="folder with an older swift_megatron_grpo")
        else:
            add("--remedy", choices=CURVES, required=True)
            add("--seed", type=int, required=True)
            add("--choice", type=absolute, default=REPOSITORY / "benchmarks" / "h200" / "parts",
                help=f"folder with {CHOICE}")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
