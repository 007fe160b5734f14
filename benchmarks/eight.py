"""Measure one node as users have it, after its memory and time were forecast: eight GPUs, or four or two.

    python -m benchmarks.eight run --gpus 8 --out DIR --work DIR --seconds 1500
    python -m benchmarks.eight run --gpus 2 --out DIR --work DIR --dry
    python -m benchmarks.eight forecast
    python -m benchmarks.eight compare --results DIR

run       measures the cases of benchmarks/harness/node/cases.py in the order of their worth, ms-swift's own trainer in
          turns with this package where a case has both. Each case has its own limit, and its file is written as its
          processes end. A case that an earlier rental measured is left out, and none starts that is unlikely to end in
          time, so that several short rentals share the work.
forecast  writes memory and time of each case by the plan of `--check true`, and of measured runs on two and four GPUs,
          to benchmarks/h200/parts/forecast-eight.json. It needs no GPU.
compare   prints forecasts next to measurements. The exit code is 1 if a peak differs by more than 5 % or a step by more
          than 20 %, or if nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.node.cases import NODES, Case, cases, is_measured, toy
from benchmarks.harness.node.compare import (
    FORECASTS,
    PEAK_BOUND,
    TIME_BOUND,
    compared,
    comparison,
    read_forecasts,
)
from benchmarks.harness.node.servers import finish, running
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import exit_at_sigterm
from swift_megatron_grpo.plugin.rank import hook_platform

CASE_LIMIT = 570  # seconds: a command of a rented machine may have ten minutes
_TO_END = 40  # seconds that a benchmark needs to end its processes


def run(args: argparse.Namespace) -> int:
    end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for case in chosen(args.gpus, args.cases):
        left = end - time.monotonic()
        if is_measured(case, args.out):
            print(f"eight: {case.name} was measured before")
        elif left < case.seconds:
            print(f"eight: {case.name}: {left:.0f} s are left, and it needs {case.seconds}", flush=True)
            failed.append(case.name)
        else:
            code = measure(case, args, min(CASE_LIMIT, left - _TO_END))
            print(f"eight: {case.name}: exit code {code}, {end - time.monotonic():.0f} s left", flush=True)
            failed += [case.name] if code else []
    return 1 if failed else 0


def chosen(gpus: int, names: list[str]) -> list[Case]:
    known = {case.name: case for case in cases(gpus)}
    if unknown := set(names) - set(known):
        raise SystemExit(f"eight: unknown case {', '.join(sorted(unknown))}; use some of {', '.join(known)}")
    return [case for name, case in known.items() if not names or name in names]


def measure(case: Case, args: argparse.Namespace, limit: float) -> int:
    """Run bench.py for a case, next to its servers, and return its exit code."""
    model = made_checkpoint(args.work, toy(case.shape) if args.dry else case.shape, with_weights=False).resolve()
    with running(case, model, args.work / case.name, args.dry) as servers:
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench",
            *case.arguments(args.dry, [url for url, _ in servers]),
            "--json",
            str(args.out / f"{case.name}.json"),
            "--work",
            str(args.work),
            "--deadline",
            str(limit),
        ]
        print(f"eight: {case.name}, at most {limit:.0f} s", flush=True)
        return finish(command, servers)


def forecast(args: argparse.Namespace) -> int:
    hook_platform()  # before Megatron is imported, on a machine without a GPU
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # of ms-swift, which prints all arguments
    from benchmarks.harness.node.forecast import forecast_all

    found = forecast_all(args.work)
    args.json.write_text(json.dumps({part: list(map(asdict, one)) for part, one in found.items()}, indent=1) + "\n")
    return 0


def compare(args: argparse.Namespace) -> int:
    rows = compared([one for part in ("cases", "measured") for one in read_forecasts(REPOSITORY, part)], args.results)
    print(comparison(rows))
    far = [row for row in rows if not row.is_near]
    bounds = f"{PEAK_BOUND:.0%} of the peak and {TIME_BOUND:.0%} of the time"
    print(f"eight: {len(rows) - len(far)} of {len(rows)} are within {bounds}")
    return 0 if rows and not far else 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    work = REPOSITORY / "runs" / "eight"
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter
    one = commands.add_parser("run", help="measure the cases", formatter_class=shows_defaults)
    one.set_defaults(call=run)
    one.add_argument("cases", nargs="*", help="names; all if not given")
    one.add_argument("--gpus", type=int, choices=NODES, default=NODES[0], help="GPUs of this machine")
    one.add_argument("--out", type=absolute, required=True, help="folder for results, and those of earlier rentals")
    one.add_argument("--work", type=absolute, default=work, help="folder for models, logs and outputs")
    one.add_argument("--seconds", type=float, default=1500, help="of the rental")
    one.add_argument("--dry", action="store_true", help="with tiny models of the same types, on as many CPU ranks")
    one = commands.add_parser("forecast", help="write the forecasts", formatter_class=shows_defaults)
    one.set_defaults(call=forecast)
    one.add_argument("--json", type=absolute, default=REPOSITORY / FORECASTS, help="file to write")
    one.add_argument("--work", type=absolute, default=work, help="folder for models without weights")
    one = commands.add_parser("compare", help="compare forecasts and results", formatter_class=shows_defaults)
    one.set_defaults(call=compare)
    one.add_argument(
        "--results", type=absolute, default=REPOSITORY / "benchmarks" / "h200", help="folder of result files"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    code: int = args.call(args)
    return code


if __name__ == "__main__":
    exit_at_sigterm()
    sys.exit(main())
