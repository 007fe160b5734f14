"""Hit one training with faults, drawn at random from a list, and check that only time and the step in flight are lost.

    python -m tests.stress.faults [--faults 50] [--seed 0] [--minutes M] [--only KIND ...] [--json FILE]

Two ranks train with vLLM in them, or with two rollout servers, with a checkpoint in every step and a dump of all
rollouts. Each fault hits the run in a random phase; the next run continues from the newest complete checkpoint, in the
same folder and dump, and is hit by the next fault. In the end a run without faults trains as many steps in another
folder. One line is printed for each fault. The exit code is 1 if a run hung, gave no reason, left processes behind or
lost a completion, if one could not continue, or if the training did not train what the one without faults trained.

Needs Linux and root, or user namespaces: file systems are mounted in a namespace of the script's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.stress.fault_kinds import DISK_BYTES, KINDS, Kind, Planned, Trial, mount_memory, restore
from tests.stress.fault_runs import Inputs, Run, account, dumped, step_of, whole_checkpoints
from tests.stress.processes import make_inputs, script_parser
from tests.support.servers import RolloutServer

MAX_DELAY = 0.8  # seconds from the start of the phase to the fault
LIMIT = 300.0  # seconds from the fault to the end of a run, or to the next step of one that continues
IN_NAMESPACE = "STRESS_IN_NAMESPACE"
COLUMNS = ("fault", "hit in", "what happened", "exit code", "reason in the log", "seconds", "next run",
           "generated again", "lost")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The course of a run after one fault."""

    fault: str
    detail: str
    step: int  # trained before the fault, in the whole training
    phase: str  # in which it hit
    result: str  # ended, went on or hung
    exit_code: int | None  # None: the run went on, and the script ended it
    reason: str
    seconds: float  # until all processes had ended, or until the next step was trained
    continued_from: int  # the step of the checkpoint that the next run began with
    generated_again: int  # completions of the steps after that checkpoint
    lost: int
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.problems


def plan(faults: int, kinds: Sequence[Kind], rng: random.Random) -> list[Planned]:
    """Draw faults: every kind twice if there are enough, the others at random; each at a random moment.

    The first one leaves a checkpoint behind. Those of servers come next, so that the servers can end after them.
    """
    weights = [kind.weight for kind in kinds]
    twice = [*kinds, *kinds][:faults]
    drawn = twice + (rng.choices(kinds, weights, k=faults - len(twice)) if any(weights) else [])
    first, rest = drawn[0], drawn[1:]
    rng.shuffle(rest)
    seen: dict[str, int] = {}
    planned = []
    for kind in [first, *sorted(rest, key=lambda kind: not kind.needs_servers)]:
        number = seen[kind.name] = seen.get(kind.name, -1) + 1
        step = 1 if not planned else rng.randint(0, 1)
        planned.append(Planned(kind.name, kind.details[number % len(kind.details)], step, rng.choice(kind.phases),
                               round(rng.uniform(0, MAX_DELAY), 2)))  # fmt: skip
    return planned


def run_trial(trial: Trial, kind: Kind) -> Outcome:
    """Inject one fault, and observe the run until it has ended."""
    problems: list[str] = []
    before = len(whole_checkpoints(trial.inputs.folder))
    kind.inject(trial)
    run = trial.run
    assert run is not None
    if not trial.hit[1]:
        problems.append(f"the run ended before the fault: {run.output[-1500:]}")
        trial.mark(*run.now())
    went_on, seconds = False, 0.0
    if kind.goes_on is not False and run.wait_for_step_after(trial.hit_at, LIMIT):
        went_on, seconds = True, run.next_step_after(trial.hit_at) - trial.hit_at
        if kind.goes_on:  # a fault at the end of training is met only in the next step
            run.wait_until(lambda: bool(reason_in(run.output + trial.other_output, kind)), LIMIT)
        run.rank(0).terminate()
    ended = run.wait_for_exit(LIMIT)
    seconds = seconds if went_on else time.time() - trial.hit_at
    left = run.kill()
    code = run.process.wait(60)
    if not ended:
        problems.append(f"{left} processes were left")
    if kind.goes_on is not None and went_on != kind.goes_on:
        problems.append("the run ended" if kind.goes_on else "the run went on")
    if not went_on and code == 0:
        problems.append("exit code 0")
    reason = reason_in(run.output + trial.other_output, kind)
    if not reason and not (went_on and kind.goes_on is None):
        problems.append("no reason in the log")
    restore(trial)
    checkpoints = whole_checkpoints(trial.inputs.folder)
    continued_from = step_of(checkpoints[-1]) if checkpoints else 0
    if before and not checkpoints:
        problems.append("no checkpoint is left")
    counts = account(run, continued_from, dumped(trial.inputs.dump))
    if counts.lost:
        problems.append(f"{counts.lost} completions were lost")
    planned, (step, phase) = trial.planned, trial.hit
    result = "went on" if went_on else "ended" if ended else "hung"
    return Outcome(planned.kind, planned.detail, step, phase, result, None if went_on else code, reason,
                   round(seconds, 1), continued_from, counts.again, counts.lost, problems)  # fmt: skip


def reason_in(output: str, kind: Kind) -> str:
    """Return the line of the log that states the reason, without the names of this machine's folders."""
    for line in output.splitlines():
        if match := re.search(kind.reason, line):
            text = re.sub(r"127\.0\.0\.1:\d+", "HOST", re.sub(r"/(?:[\w.+-]+/)+", "", match[0]))
            return text if len(text) <= 160 else text[:157] + "..."
    return ""


def compare(inputs: Inputs, trained: dict[int, list[str]], runs: int) -> tuple[dict[str, Any], bool]:
    """Train as many steps without a fault, and compare the completions of each step."""
    steps = max(trained, default=0)
    undisturbed = Inputs(inputs.work / "undisturbed", inputs.model, inputs.dataset)
    undisturbed.work.mkdir()
    flags = ["--save_steps", "1000", "--no_save_optim", "true", "--no_save_rng", "true"]
    run = Run.start(undisturbed, "run", None, flags)
    reached = run.wait_for(steps, "", 20 * LIMIT)
    run.kill()
    expected = {step: digests for step, digests in run.trained().items() if step <= steps}
    same = sum(trained.get(step) == digests for step, digests in expected.items())
    in_dump = dumped(inputs.dump)
    matching = sum(in_dump.get(step - 1) == digests for step, digests in trained.items())
    result = {"runs": runs, "steps": steps, "completions": sum(map(len, trained.values())),
              "steps that trained the completions in the dump": matching,
              "steps that trained the completions of the undisturbed run": same}  # fmt: skip
    complete = sorted(trained) == list(range(1, steps + 1)) and reached
    return result, complete and matching == steps and same == steps


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for one in outcomes:
        fault = f"{one.fault}: {one.detail}" if one.detail else one.fault
        cells = [fault, f"step {one.step + 1}, {one.phase}", one.result,
                 "" if one.exit_code is None else str(one.exit_code),
                 one.reason.replace("|", "\\|").replace("<", "&lt;"), f"{one.seconds:.1f}",
                 f"from step {one.continued_from}", str(one.generated_again or ""), str(one.lost)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each kind of fault."""
    lines = ["| fault | times | the run | seconds | generated again | lost |", "| --- | --- | --- | --- | --- | --- |"]
    for kind in dict.fromkeys(one.fault for one in outcomes):
        of_kind = [one for one in outcomes if one.fault == kind]
        continued = sum(one.result == "went on" for one in of_kind)
        ended = len(of_kind) - continued
        results = [f"{word} {count}" for word, count in (("continued", continued), ("ended", ended)) if count]
        seconds = [one.seconds for one in of_kind]
        cells = [kind, str(len(of_kind)), ", ".join(results), f"{min(seconds):.1f} to {max(seconds):.1f}",
                 str(sum(one.generated_again for one in of_kind)), str(sum(one.lost for one in of_kind))]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def enter_namespace(argv: Sequence[str]) -> None:
    """Start this script again with separate mounts, unless it has them already."""
    if IN_NAMESPACE in os.environ:
        return
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *rights, "--mount", "--propagation", "private", sys.executable, "-m", "tests.stress.faults"]
    code = subprocess.run([*command, *argv], env={**os.environ, IN_NAMESPACE: "1"}, check=False).returncode
    raise SystemExit(code)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = script_parser(__doc__, "faults")
    parser.add_argument("--faults", type=int, default=50, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    minutes_help = "start no further fault after this time (default: no limit)"
    parser.add_argument("--minutes", type=float, default=float("inf"), help=minutes_help)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kinds of faults (default: all)")
    return parser.parse_args(argv)


def inject_all(
    planned: Sequence[Planned], inputs: Inputs, end: float, report: Path | None, seed: int
) -> tuple[list[Outcome], dict[int, list[str]]]:
    """Inject one fault after the other; return what happened, and what the training has trained."""
    outcomes, servers, trained = list[Outcome](), list[RolloutServer](), dict[int, list[str]]()
    try:
        for number, fault in enumerate(planned, start=1):
            if time.monotonic() > end:
                break
            kind = next(kind for kind in KINDS if kind.name == fault.kind)
            if kind.needs_servers:
                prepare_servers(servers, inputs)
            elif number > 1:
                end_servers(servers)
            if not whole_checkpoints(inputs.folder):
                shutil.rmtree(inputs.dump, ignore_errors=True)
            trial = Trial(inputs, fault, f"fault-{number}", servers)
            try:
                one = run_trial(trial, kind)
            finally:
                if trial.run is not None:
                    trial.run.kill()
            outcomes.append(one)
            assert trial.run is not None
            trained |= trial.run.trained()
            trained = {step: digests for step, digests in trained.items() if step <= one.continued_from}
            verdict = "good" if one.good else f"BAD: {'; '.join(one.problems)}"
            print(f"{number} {one.fault} {one.detail}, step {one.step + 1}, {one.phase}: {one.result} after "
                  f"{one.seconds:.1f} s, next from step {one.continued_from}; {verdict}", flush=True)  # fmt: skip
            if report is not None:
                write_json(report, seed, outcomes, {}, good=False)
    finally:
        end_servers(servers)
    return outcomes, trained


def prepare_servers(servers: list[RolloutServer], inputs: Inputs) -> None:
    """Start two servers, or wait for those that a fault has hit."""
    if not servers:
        servers += [RolloutServer(inputs.model, inputs.work / f"server-{number}.txt").start() for number in (1, 2)]
    for server in servers:
        server.wait()


def end_servers(servers: list[RolloutServer]) -> None:
    while servers:
        servers.pop().kill()


def write_json(path: Path, seed: int, outcomes: Sequence[Outcome], result: dict[str, Any], good: bool) -> None:
    faults = [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps({"seed": seed, "good": good, "result": result, "faults": faults}, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    enter_namespace(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the runs as well
    kinds = [kind for kind in KINDS if kind.name in args.only]
    inputs = Inputs(*make_inputs(args.work, rows=64))
    for folder in (inputs.folder, inputs.dump):
        mount_memory(folder.parent, DISK_BYTES)
    end = time.monotonic() + 60 * args.minutes
    planned = plan(args.faults, kinds, random.Random(args.seed))
    outcomes, trained = inject_all(planned, inputs, end, args.json, args.seed)
    print(table(outcomes), flush=True)
    result, good = compare(inputs, trained, len(outcomes))
    good = good and all(outcome.good for outcome in outcomes)
    print("\n".join(f"{name}: {value}" for name, value in result.items()))
    print("passed: nothing was lost" if good else "failed: see the lines that are BAD", flush=True)
    if args.json is not None:
        write_json(args.json, args.seed, outcomes, result, good)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
