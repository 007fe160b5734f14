"""kill -9 of rollout servers at random moments of a run, and whether it has cost anything but time.

    python -m tests.stress.kill_servers [--kills 20] [--seed 0] [--steps 40] [--json FILE] [--work DIR]

Two servers and a trainer of two ranks, tiny, on CPUs. First a run that nobody disturbs. Then the same with kills: each
in a random step, at a random moment after a random phase has begun; of a random server, which is started again some
seconds later and may be killed while it starts, or while the other one is down as well. Half of the kills hit all of a
server's processes, the others its engine or its web server alone, and the rest must end by itself. Prints a line for
each kill. Exit code 1 unless the second run ended by itself with exactly what the first one trained: every completion
once, none lost, and the same numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.stress.survival.processes import REPOSITORY, Server, Trainer, digest, free_ports, make_inputs

PHASES = ("generation", "weights on their way", "weight_sync", "sync_check", "grading", "train", "between phases")
LONGEST_DELAY = 1.0  # seconds after the phase has begun
LONGEST_ABSENCE = 8.0  # seconds until a killed server is started again
LONGEST_END = 60.0  # seconds that what is left of one has to end
PARTS = ("all", "all", "engine", "web server")
COLUMNS = ("s", "step", "phase", "killed of the server", "which", "both down", "unfinished", "s until these were there",
           "s until it generated again")  # fmt: skip
NUMBERS = ("loss", "grad_norm", "reward")
CLOSE = 1e-4  # relative: completions made beside others differ by rounding


@dataclass(frozen=True)
class Aim:
    """When to kill: in this phase of this step, or as soon as possible afterwards."""

    step: int
    phase: str
    delay: float
    absence: float
    part: str  # of the server


@dataclass
class Kill:
    at: float  # time.time()
    after: float  # seconds since the first step began
    step: int
    phase: str
    server: int
    part: str
    was: str  # what the server was doing
    both_down: bool
    unfinished: int = 0  # completions that it was making
    recovered: float | None = None  # seconds until they were there
    generates_again: float | None = None  # seconds until it had started, and had the weights


def aims(kills: int, steps: int, rng: random.Random) -> list[Aim]:
    at = sorted(rng.randrange(1, steps) for _ in range(kills))
    return [
        Aim(step, rng.choice(PHASES), rng.uniform(0, LONGEST_DELAY), rng.uniform(0, LONGEST_ABSENCE), rng.choice(PARTS))
        for step in at
    ]


class Disturbance:
    """Kills, and starts again."""

    def __init__(self, trainer: Trainer, servers: Sequence[Server], planned: Sequence[Aim], rng: random.Random) -> None:
        self._trainer, self._servers, self._rng = trainer, servers, rng
        self._planned = list(planned)
        self._due: float | None = None  # when the next kill is, once its phase has come
        self._return_at: dict[int, float] = {}
        self.kills: list[Kill] = []
        self.did_not_end: list[Kill] = []

    def watch(self) -> None:
        """Until the trainer ends."""
        while self._trainer.runs:
            self._start_again()
            events = self._trainer.noted()
            began = next((event["at"] for event in events if event.get("phase") == "generation"), None)
            if began is not None and self._planned:
                step = max((event["step"] for event in events if "step" in event), default=0)
                phase = next((event["phase"] for event in reversed(events) if "phase" in event), "")
                self._consider(began, step, phase)
            time.sleep(0.02)

    def _start_again(self) -> None:
        for number, at in list(self._return_at.items()):
            server = self._servers[number]
            if time.time() >= at + LONGEST_END and server.processes():
                self.did_not_end.append(next(kill for kill in reversed(self.kills) if kill.server == number))
                server.kill()
            if time.time() >= at and not server.processes():
                del self._return_at[number]
                server.start()

    def _consider(self, began: float, step: int, phase: str) -> None:
        aim = self._planned[0]
        if self._due is None:
            if step > aim.step or (step == aim.step and phase == aim.phase):
                self._due = time.time() + aim.delay
            return
        running = [number for number, server in enumerate(self._servers) if number not in self._return_at]
        if time.time() < self._due or not running:
            return
        victim = self._rng.choice(running)
        server, self._due = self._servers[victim], None
        was = self._activity(server)
        now = time.time()
        if aim.part == "all":
            server.kill()
        else:
            server.kill_part(aim.part)
        both_down = not any(other is not server and other.status() is not None for other in self._servers)
        self._return_at[victim] = now + aim.absence
        self.kills.append(Kill(now, round(now - began, 1), step, phase, victim, aim.part, was, both_down))
        self._planned.pop(0)
        print(f"kill {len(self.kills)}: {aim.part} of server {victim} ({was}) in {phase!r} of step {step}", flush=True)

    @staticmethod
    def _activity(server: Server) -> str:
        status = server.status()
        if status is None:
            return "starting"
        version = status["weights_version"]
        return f"had weights {version}" if version >= 0 else "had no weights"


def tell_costs(kills: Sequence[Kill], trainer: Trainer, servers: Sequence[Server]) -> None:
    """From what the trainer has logged of each."""
    for number, kill in enumerate(kills):
        url = re.escape(servers[kill.server].url)
        later = [each.at for each in kills[number + 1 :] if each.server == kill.server]
        until = later[0] if later else float("inf")
        lines = [each for each in trainer.said if kill.at <= each.at <= until]
        for line in lines:
            if found := re.search(rf"(\d+) unfinished completions of {url} are asked again", line.text):
                kill.unfinished = int(found[1])
        for line in trainer.said:  # perhaps only after it was killed once more
            told = re.search(rf"every completion that {url} had not finished is there again", line.text)
            if told and line.at >= kill.at and kill.unfinished and kill.recovered is None:
                kill.recovered = round(line.at - kill.at, 1)
        back = [i for i, line in enumerate(lines) if re.search(rf"rollout server {url} is back", line.text)]
        for line in lines[back[0] :] if back else []:
            if kill.generates_again is None and "may generate with weights" in line.text:
                kill.generates_again = round(line.at - kill.at, 1)


@dataclass(frozen=True)
class Outcome:
    """What a run has trained."""

    ids: list[tuple[str, int]]  # prompt and place in its group, of every trained completion, in order
    tokens: list[str]  # digest of each
    numbers: list[list[float]]  # by step
    seconds: float

    @classmethod
    def of(cls, trainer: Trainer) -> Outcome:
        """Raises if what was trained is not what was dumped."""
        code = trainer.process.wait()
        if code != 0:
            end = "\n".join(line.text for line in trainer.said[-40:])
            raise RuntimeError(f"the run ended with exit code {code}; the end of its output:\n{end}")
        ids, tokens = list[tuple[str, int]](), list[str]()
        events = [event for event in trainer.noted() if "trained" in event]
        files = sorted(dump_of(trainer.folder).glob("rollout-*.jsonl"))
        if [event["step"] for event in events] != list(range(1, len(files) + 1)):
            raise RuntimeError(f"{len(files)} rollouts, trained in steps {[event['step'] for event in events]}")
        for event, path in zip(events, files, strict=True):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            if event["trained"] != [digest(row["prompt_ids"] + row["completion_ids"]) for row in rows]:
                raise RuntimeError(f"step {event['step']} did not train the completions of {path}")
            places: Counter[str] = Counter()
            for row in rows:
                ids.append((row["prompt_id"], places[row["prompt_id"]]))
                places[row["prompt_id"]] += 1
            tokens += event["trained"]
        numbers = [[step[name] for name in NUMBERS] for step in trainer.steps()]
        return cls(ids, tokens, numbers, events[-1]["at"] - events[0]["at"])


def dump_of(folder: Path) -> Path:
    return folder.with_suffix(".rollouts")


def judge(there: Outcome, here: Outcome) -> tuple[dict[str, Any], bool]:
    """The disturbed run beside the undisturbed one."""
    twice = [name for name, times in Counter(there.ids).items() if times > 1]
    lost = set(here.ids) - set(there.ids)
    apart = [
        abs(one - other) / max(abs(one), abs(other), 1e-3)
        for step, same_step in zip(there.numbers, here.numbers, strict=True)
        for one, other in zip(step, same_step, strict=True)
    ]
    same = sum(one == other for one, other in zip(there.tokens, here.tokens, strict=False))
    told = {
        "trained": len(there.ids),
        "trained without kills": len(here.ids),
        "trained twice": len(twice),
        "lost": len(lost),
        "completions that are the same, token by token": same,
        "largest relative difference of loss, gradient norm and reward": max(apart),
        "seconds": round(there.seconds, 1),
        "seconds without kills": round(here.seconds, 1),
    }
    return told, len(there.ids) == len(here.ids) and not twice and not lost and max(apart) <= CLOSE


def table(kills: Sequence[Kill]) -> str:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for kill in kills:
        cells = [f"{kill.after:.1f}", str(kill.step), kill.phase, kill.part, kill.was, "yes" if kill.both_down else "",
                 str(kill.unfinished or ""), seconds(kill.recovered), seconds(kill.generates_again)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "kill_servers")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model, dataset = make_inputs(work, rows=64)
    first, second, rendezvous, again = free_ports(4)
    servers = [Server(model, port, work / f"server-{port}.txt") for port in (first, second)]
    flags = ["--train_iters", str(args.steps), "--save_steps", str(args.steps), "--global_batch_size", "16",
             "--max_completion_length", "100", "--vllm_server_timeout", "900"]  # fmt: skip
    trainers: list[Trainer] = []

    def train(name: str, port: int) -> Trainer:
        folder = work / name
        more = [*flags, "--rollout_dump", str(dump_of(folder))]
        trainers.append(Trainer.start(folder, model, dataset, servers, 2, port, more, {"WITNESS_TRANSFER": "0.3"}))
        return trainers[-1]

    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        here = Outcome.of(train("undisturbed", rendezvous))
        print(f"undisturbed: {len(here.ids)} completions trained in {here.seconds:.0f} s", flush=True)
        trainer = train("disturbed", again)
        disturbance = Disturbance(trainer, servers, aims(args.kills, args.steps, rng), rng)
        disturbance.watch()
        there = Outcome.of(trainer)
    finally:
        for process in trainers:
            process.end()
        for server in servers:
            server.kill()
    tell_costs(disturbance.kills, trainer, servers)
    told, good = judge(there, here)
    good = good and len(disturbance.kills) == args.kills and not disturbance.did_not_end
    print(table(disturbance.kills))
    for kill in disturbance.did_not_end:
        print(f"server {kill.server} had not ended {LONGEST_END:.0f} s after its {kill.part} was killed")
    print("\n".join(f"{name}: {value:g}" for name, value in told.items()))
    print("nothing was lost" if good else "this is not what an undisturbed run trains", flush=True)
    if args.json is not None:
        kills = [{name: value for name, value in asdict(kill).items() if name != "at"} for kill in disturbance.kills]
        story = {"seed": args.seed, "steps": args.steps, "good": good, "result": told, "kills": kills}
        args.json.write_text(json.dumps(story, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
