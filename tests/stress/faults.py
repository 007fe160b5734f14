"""Hit runs with faults, drawn at random from a list, and record how each run ends, or goes on, and what it loses.

    python -m tests.stress.faults [--faults 50] [--seed 0] [--only KIND ...] [--json FILE] [--work DIR]

Every run is a real one: two ranks with vLLM in them, or with two rollout servers, a checkpoint in every step, and a
dump of all rollouts. Each fault hits a run of its own in a random phase of a random step. Afterwards a second run
continues from the newest complete checkpoint for two steps, in the same folder and dump. One line is printed for each
fault. The exit code is 1 if a run hung, gave no reason, left processes behind or lost a completion, if the second run
could not continue, or if some step did not train what the dump holds.

Needs Linux and root, or `unshare --user --map-root-user`: file systems are mounted in a namespace of the script's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.e2e.servers import RolloutServer
from tests.stress.fault_kinds import KINDS, STEPS_OF_A_RUN_THAT_GOES_ON, Kind, Planned, Trial, restore
from tests.stress.fault_runs import EXIT_SECONDS, Completions, Inputs, Run, account, newest_checkpoint, resume_flags
from tests.stress.processes import make_inputs, script_parser

MAX_DELAY = 0.8  # seconds from the start of the phase to the fault
LIMIT = 180.0  # seconds from the fault to the end of a run, or of the steps of one that goes on
IN_NAMESPACE = "STRESS_IN_NAMESPACE"
COLUMNS = ("fault", "hit", "result", "exit code", "reason in the log", "seconds", "then", "generated again", "lost")


@dataclass(frozen=True)
class Outcome:
    """What happened after one fault."""

    fault: str
    detail: str
    step: int  # trained before the fault
    phase: str  # in which it hit
    result: str  # ended, went on, hung
    exit_code: int | None
    reason: str
    seconds: float  # until all processes had ended, or until the next step was trained
    then: str  # what the next run did
    generated_again: int  # completions of the step in flight
    lost: int
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.problems


def plan(faults: int, kinds: Sequence[Kind], rng: random.Random) -> list[Planned]:
    """Draw faults: every kind as often as the number allows, the others at random; each at a random moment."""
    drawn = [*kinds] * (faults // len(kinds)) + rng.sample(kinds, faults % len(kinds))
    drawn.sort(key=lambda kind: kinds.index(kind))
    seen: dict[str, int] = {}
    planned = []
    for kind in drawn:
        number = seen[kind.name] = seen.get(kind.name, -1) + 1
        detail = kind.details[number % len(kind.details)]
        step = rng.randint(kind.first_step, kind.first_step + 1)
        planned.append(Planned(kind.name, detail, step, rng.choice(kind.phases), round(rng.uniform(0, MAX_DELAY), 2)))
    return planned


def run_trial(trial: Trial, kind: Kind) -> Outcome:
    """Inject one fault, observe the run, and continue it."""
    problems: list[str] = []
    kind.inject(trial)
    run = trial.run
    assert run is not None
    if not trial.hit_at:
        problems.append("the run ended before the fault")
        trial.mark()
    ended = run.wait(LIMIT) and run.wait_for_exit(EXIT_SECONDS)
    seconds = time.time() - trial.hit_at
    left = run.kill()
    code = run.process.wait(60)
    if not ended:
        problems.append(f"{left} processes were left")
    went_on = ended and code == 0
    if went_on:
        later = [event["at"] for event in run.events() if "trained" in event and event["at"] > trial.hit_at]
        seconds = min(later, default=trial.hit_at) - trial.hit_at
    if kind.goes_on is not None and went_on != kind.goes_on:
        problems.append(f"exit code {code}")
    reason = reason_in(run, kind)
    if not reason and not (went_on and kind.goes_on is None):
        problems.append("no reason in the log")
    restore(trial)
    then, continued = continue_run(trial, run, went_on, problems)
    counts = account([(run, 0), continued] if continued else [(run, 0)])
    if counts.lost or counts.problem:
        problems.append(counts.problem or f"{counts.lost} completions were lost")
    return outcome_of(trial, "went on" if went_on else "ended" if ended else "hung", code, reason, seconds, then,
                      counts, problems)  # fmt: skip


def outcome_of(
    trial: Trial, result: str, code: int, reason: str, seconds: float, then: str, counts: Completions,
    problems: list[str],
) -> Outcome:  # fmt: skip
    planned, (step, phase) = trial.planned, trial.hit
    return Outcome(planned.kind, planned.detail, step, phase, result, code, reason, round(seconds, 1), then,
                   counts.again, counts.lost, problems)  # fmt: skip


def reason_in(run: Run, kind: Kind) -> str:
    """Return the first line of the log that states the reason, without the names of folders of this machine."""
    for line in run.output.splitlines():
        if match := re.search(kind.reasons, line):
            text = re.sub(r"/(?:[\w.+-]+/)+", "", match[0])
            return text if len(text) <= 160 else text[:157] + "..."
    return ""


def continue_run(trial: Trial, run: Run, went_on: bool, problems: list[str]) -> tuple[str, tuple[Run, int] | None]:
    """Start the run that continues, unless all steps were trained; return what it did."""
    if went_on:
        return "all steps were trained", None
    checkpoint = newest_checkpoint(run.folder)
    flags = resume_flags(checkpoint)
    step = int(checkpoint.name.split("-")[1]) if checkpoint else 0
    if checkpoint is None:
        shutil.rmtree(run.dump, ignore_errors=True)
    resumed = Run.start(trial.inputs, run.folder, run.dump, f"{trial.name}-resumed", flags)
    resumed.wait_for_exit(LIMIT)
    resumed.kill()
    if resumed.process.wait(60) != 0:
        problems.append(f"the run from step {step} did not continue: {resumed.output[-1500:]}")
    return f"continued from step {step}" if checkpoint else "started again", (resumed, step)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for one in outcomes:
        fault = f"{one.fault} ({one.detail})" if one.detail else one.fault
        cells = [fault, f"step {one.step + 1}, {one.phase}", one.result, str(one.exit_code),
                 one.reason.replace("|", "\\|").replace("<", "&lt;"), f"{one.seconds:.1f}", one.then,
                 str(one.generated_again or ""), str(one.lost)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def enter_namespace(argv: Sequence[str]) -> None:
    """Start this script again with mounts of its own, unless it has them already."""
    if IN_NAMESPACE in os.environ:
        return
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *rights, "--mount", "--propagation", "private", sys.executable, "-m", "tests.stress.faults"]
    code = subprocess.run([*command, *argv], env={**os.environ, IN_NAMESPACE: "1"}, check=False).returncode
    raise SystemExit(code)


def write_json(path: Path, seed: int, outcomes: Sequence[Outcome], seconds: float) -> None:
    faults: list[dict[str, Any]] = [asdict(outcome) for outcome in outcomes]
    report = {"seed": seed, "good": all(outcome.good for outcome in outcomes), "seconds": round(seconds),
              "faults": faults}  # fmt: skip
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = script_parser(__doc__, "faults", steps=STEPS_OF_A_RUN_THAT_GOES_ON)
    parser.add_argument("--faults", type=int, default=50, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kinds of faults (default: all)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    enter_namespace(argv)
    kinds = [kind for kind in KINDS if kind.name in args.only]
    work, model, dataset = make_inputs(args.work, rows=64)
    inputs, outcomes, servers = Inputs(work, model, dataset), list[Outcome](), list[RolloutServer]()
    began = time.monotonic()
    try:
        for number, planned in enumerate(plan(args.faults, kinds, random.Random(args.seed)), start=1):
            kind = next(kind for kind in kinds if kind.name == planned.kind)
            trial = Trial(inputs, planned, f"fault-{number}", servers)
            if kind.needs_servers:
                prepare_servers(servers, inputs)
            try:
                outcomes.append(run_trial(trial, kind))
            finally:
                if trial.run is not None:
                    trial.run.kill()
                trial.unmount()
            one = outcomes[-1]
            verdict = "good" if one.good else f"BAD: {'; '.join(one.problems)}"
            print(f"{number} {one.fault} {one.detail}, step {one.step + 1}, {one.phase}: {one.result} after "
                  f"{one.seconds:.1f} s, {one.then}; {verdict}", flush=True)  # fmt: skip
            if args.json is not None:
                write_json(args.json, args.seed, outcomes, time.monotonic() - began)
    finally:
        for server in servers:
            server.kill()
    print(table(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def prepare_servers(servers: list[RolloutServer], inputs: Inputs) -> None:
    """Start two servers, or wait for those that a fault has hit."""
    if not servers:
        servers += [RolloutServer(inputs.model, inputs.work / f"server-{number}.txt").start() for number in (1, 2)]
    for server in servers:
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
