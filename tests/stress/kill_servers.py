"""Kill rollout servers with SIGKILL at random moments of a run and check that only time is lost.

    python -m tests.stress.kill_servers [--kills 20] [--seed 0] [--steps 40] [--json FILE] [--work DIR]

Starts two servers and a trainer of two ranks, tiny, on CPUs. The first run is undisturbed. The second run is the same
with kills: each in a random step, at a random moment after the start of a random phase. The server is chosen at random
and restarted some seconds later; it may be killed again while it starts, or while the other server is down as well.
Half of the kills hit all processes of a server; the others hit only its engine or its web server, and the remaining
processes must exit without help. One line is printed for each kill. The exit code is 1 unless the second run finished
by itself and trained exactly what the first one trained: every completion once, none lost, and the same numbers.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.stress.processes import TRANSFER_VARIABLE, Server, Trainer, digest, free_ports, make_inputs, script_parser

PHASES = ("generation", "weight transfer", "weight_sync", "sync_check", "grading", "train", "between phases")
MAX_DELAY = 1.0  # seconds from the start of the phase to the kill
MAX_DOWNTIME = 8.0  # seconds until a killed server is restarted
MAX_EXIT_TIME = 60.0  # seconds for the remaining processes of a server to exit
PARTS = ("all", "all", "engine", "web server")
COLUMNS = ("time (s)", "step", "phase", "killed", "server state", "both down", "unfinished completions",
           "regenerated after (s)", "server generated again after (s)")  # fmt: skip
METRICS = ("loss", "grad_norm", "reward")
TOLERANCE = 1e-4  # relative: by rounding, completions depend on what else vLLM generates at the same time
# Log lines of the trainer from which the costs of a kill are read.
UNFINISHED = r"(\d+) unfinished completions of {url} will be retried"
RECOVERED = r"all completions lost with {url} are recovered"
SERVER_IS_BACK = r"rollout server {url} is back"
HAS_WEIGHTS = r"may generate with weights"


@dataclass(frozen=True)
class PlannedKill:
    """Target of one kill: this phase of this step, or the earliest moment afterwards."""

    step: int
    phase: str
    delay: float  # seconds after the start of the phase
    downtime: float  # seconds until the restart
    part: str  # of the server


@dataclass
class Kill:
    at: float  # time.time()
    after: float  # seconds since the first step began
    step: int
    phase: str
    server: int
    part: str
    was: str  # state of the server
    both_down: bool
    unfinished: int = 0  # completions in progress on the server
    recovered: float | None = None  # seconds until all of them were regenerated
    generates_again: float | None = None  # seconds until the server had restarted and received weights


def plan_kills(kills: int, steps: int, rng: random.Random) -> list[PlannedKill]:
    at = sorted(rng.randrange(1, steps) for _ in range(kills))
    return [
        PlannedKill(
            step, rng.choice(PHASES), rng.uniform(0, MAX_DELAY), rng.uniform(0, MAX_DOWNTIME), rng.choice(PARTS)
        )
        for step in at
    ]


class ServerKiller:
    """Kills servers as planned and restarts them."""

    def __init__(
        self, trainer: Trainer, servers: Sequence[Server], planned: Sequence[PlannedKill], rng: random.Random
    ) -> None:
        self._trainer, self._servers, self._rng = trainer, servers, rng
        self._planned = list(planned)
        self._due: float | None = None  # time of the next kill, once its phase has begun
        self._restart_at: dict[int, float] = {}
        self.kills: list[Kill] = []
        self.failed_exits: list[Kill] = []  # kills after which processes of the server remained

    def run(self) -> None:
        """Kill and restart servers until the trainer ends."""
        while self._trainer.is_running:
            self._restart_servers()
            events = self._trainer.events()
            began = next((event["at"] for event in events if event.get("phase") == "generation"), None)
            if began is not None and self._planned:
                step = max((event["step"] for event in events if "step" in event), default=0)
                phase = next((event["phase"] for event in reversed(events) if "phase" in event), "")
                self._kill_if_due(began, step, phase)
            time.sleep(0.02)

    def _restart_servers(self) -> None:
        for number, at in list(self._restart_at.items()):
            server = self._servers[number]
            if time.time() >= at + MAX_EXIT_TIME and server.processes():
                self.failed_exits.append(next(kill for kill in reversed(self.kills) if kill.server == number))
                server.kill()
            if time.time() >= at and not server.processes():
                del self._restart_at[number]
                server.start()

    def _kill_if_due(self, began: float, step: int, phase: str) -> None:
        planned = self._planned[0]
        if self._due is None:
            if step > planned.step or (step == planned.step and phase == planned.phase):
                self._due = time.time() + planned.delay
            return
        running = [number for number in range(len(self._servers)) if number not in self._restart_at]
        if time.time() < self._due or not running:
            return
        victim = self._rng.choice(running)
        server, self._due = self._servers[victim], None
        state = self._state(server)
        now = time.time()
        if planned.part == "all":
            server.kill()
        else:
            server.kill_part(planned.part)
        both_down = not any(other is not server and other.status() is not None for other in self._servers)
        self._restart_at[victim] = now + planned.downtime
        self.kills.append(Kill(now, round(now - began, 1), step, phase, victim, planned.part, state, both_down))
        self._planned.pop(0)
        print(f"kill {len(self.kills)}: {planned.part} of server {victim} ({state}), step {step}, phase {phase!r}",
              flush=True)  # fmt: skip

    @staticmethod
    def _state(server: Server) -> str:
        status = server.status()
        if status is None:
            return "starting"
        version = status["weights_version"]
        return f"had weights {version}" if version >= 0 else "had no weights"


def add_costs(kills: Sequence[Kill], trainer: Trainer, servers: Sequence[Server]) -> None:
    """Complete every kill with its costs, read from the trainer's log."""
    for number, kill in enumerate(kills):
        url = re.escape(servers[kill.server].url)
        next_kill = next((other.at for other in kills[number + 1 :] if other.server == kill.server), float("inf"))
        until_next = [line for line in trainer.output if kill.at <= line.at <= next_kill]
        for line in until_next:
            if match := re.search(UNFINISHED.format(url=url), line.text):
                kill.unfinished = int(match[1])
        for line in trainer.output:  # recovery may complete only after the next kill of this server
            recovered = re.search(RECOVERED.format(url=url), line.text)
            if recovered and line.at >= kill.at and kill.unfinished and kill.recovered is None:
                kill.recovered = round(line.at - kill.at, 1)
        back = [i for i, line in enumerate(until_next) if re.search(SERVER_IS_BACK.format(url=url), line.text)]
        for line in until_next[back[0] :] if back else []:
            if kill.generates_again is None and re.search(HAS_WEIGHTS, line.text):
                kill.generates_again = round(line.at - kill.at, 1)


@dataclass(frozen=True)
class Outcome:
    """Completions and metrics that a run trained."""

    ids: list[tuple[str, int]]  # (prompt, place in its group) of every trained completion, in order
    tokens: list[str]  # digest of each
    numbers: list[list[float]]  # [step][metric]
    seconds: float

    @classmethod
    def of_run(cls, trainer: Trainer) -> Outcome:
        """Wait for the run; raise if it failed or if a step did not train the completions in its rollout dump."""
        trainer.check_exit()
        ids, tokens = list[tuple[str, int]](), list[str]()
        events = [event for event in trainer.events() if "trained" in event]
        files = sorted(dump_folder(trainer.folder).glob("rollout-*.jsonl"))
        if [event["step"] for event in events] != list(range(1, len(files) + 1)):
            raise RuntimeError(
                f"{len(files)} rollouts were dumped, but the trained steps are {[event['step'] for event in events]}"
            )
        for event, path in zip(events, files, strict=True):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            if event["trained"] != [digest(row["prompt_ids"] + row["completion_ids"]) for row in rows]:
                raise RuntimeError(f"step {event['step']} did not train the completions in {path}")
            places: Counter[str] = Counter()
            for row in rows:
                ids.append((row["prompt_id"], places[row["prompt_id"]]))
                places[row["prompt_id"]] += 1
            tokens += event["trained"]
        numbers = [[step[name] for name in METRICS] for step in trainer.logged_steps()]
        return cls(ids, tokens, numbers, events[-1]["at"] - events[0]["at"])


def dump_folder(output: Path) -> Path:
    return output.with_suffix(".rollouts")


def compare_outcomes(disturbed: Outcome, undisturbed: Outcome) -> tuple[dict[str, Any], bool]:
    """Return counts and differences of the two runs, and True if nothing was lost, repeated or changed."""
    repeated = [name for name, times in Counter(disturbed.ids).items() if times > 1]
    lost = set(undisturbed.ids) - set(disturbed.ids)
    differences = [
        abs(one - other) / max(abs(one), abs(other), 1e-3)
        for step, same_step in zip(disturbed.numbers, undisturbed.numbers, strict=True)
        for one, other in zip(step, same_step, strict=True)
    ]
    same = sum(one == other for one, other in zip(disturbed.tokens, undisturbed.tokens, strict=False))
    result = {
        "trained": len(disturbed.ids),
        "trained without kills": len(undisturbed.ids),
        "trained twice": len(repeated),
        "lost": len(lost),
        "completions that are the same, token by token": same,
        "largest relative difference of loss, gradient norm and reward": max(differences),
        "seconds": round(disturbed.seconds, 1),
        "seconds without kills": round(undisturbed.seconds, 1),
    }
    same_count = len(disturbed.ids) == len(undisturbed.ids)
    return result, same_count and not repeated and not lost and max(differences) <= TOLERANCE


def table(kills: Sequence[Kill]) -> str:
    """Return the kills as a Markdown table."""

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for kill in kills:
        cells = [f"{kill.after:.1f}", str(kill.step), kill.phase, kill.part, kill.was, "yes" if kill.both_down else "",
                 str(kill.unfinished or ""), seconds(kill.recovered), seconds(kill.generates_again)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = script_parser(__doc__, "kill_servers", steps=40)
    parser.add_argument("--kills", type=int, default=20, help="kills in the second run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    work, model, dataset = make_inputs(args.work, rows=64)
    first, second, first_rendezvous, second_rendezvous = free_ports(4)
    servers = [Server(model, port, work / f"server-{port}.txt") for port in (first, second)]
    flags = ["--train_iters", str(args.steps), "--save_steps", str(args.steps), "--global_batch_size", "16",
             "--max_completion_length", "100", "--vllm_server_timeout", "900"]  # fmt: skip
    trainers: list[Trainer] = []

    def train(name: str, port: int) -> Trainer:
        folder = work / name
        all_flags = [*flags, "--rollout_dump", str(dump_folder(folder))]
        trainers.append(Trainer.start(folder, model, dataset, servers, 2, port, all_flags, {TRANSFER_VARIABLE: "0.3"}))
        return trainers[-1]

    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        undisturbed = Outcome.of_run(train("undisturbed", first_rendezvous))
        print(f"undisturbed: {len(undisturbed.ids)} completions trained in {undisturbed.seconds:.0f} s", flush=True)
        trainer = train("disturbed", second_rendezvous)
        killer = ServerKiller(trainer, servers, plan_kills(args.kills, args.steps, rng), rng)
        killer.run()
        disturbed = Outcome.of_run(trainer)
    finally:
        for process in trainers:
            process.kill()
        for server in servers:
            server.kill()
    add_costs(killer.kills, trainer, servers)
    result, good = compare_outcomes(disturbed, undisturbed)
    good = good and len(killer.kills) == args.kills and not killer.failed_exits
    print(table(killer.kills))
    for kill in killer.failed_exits:
        print(f"server {kill.server}: processes still ran {MAX_EXIT_TIME:.0f} s after its {kill.part} was killed")
    print("\n".join(f"{name}: {value:g}" for name, value in result.items()))
    print("passed: nothing was lost" if good else "failed: the run with kills differs from the undisturbed run",
          flush=True)  # fmt: skip
    if args.json is not None:
        kills = [{name: value for name, value in asdict(kill).items() if name != "at"} for kill in killer.kills]
        report = {"seed": args.seed, "steps": args.steps, "good": good, "result": result, "kills": kills}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
