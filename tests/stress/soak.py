"""Train hundreds of tiny steps with a rollout server and check that no process gains memory.

    python -m tests.stress.soak [--steps 500] [--warm_up 100] [--json FILE] [--work DIR]

Starts one rollout server and a trainer of one rank, on CPUs, with the check after every weight sync on. The resident
memory of each process is read after every step. Growth compares the median of the last twentieth of the steps with the
median of as many steps after the warm-up. The exit code is 1 if all processes of the server together, or all of the
trainer, have grown by 1 % or more.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence

import psutil

from tests.stress.processes import Server, Trainer, free_ports, make_inputs, script_parser

ALLOWED = 0.01
Memory = dict[str, int]  # bytes by process


def memory_of(pid: int) -> Memory:
    """Return the resident memory of the process and its descendants, without those that exit in the meantime."""
    memory: Memory = {}
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with process.oneshot():
                name = f"{process.name()} {process.pid}"
                memory[name] = process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return memory


def growth(values: Sequence[int], warm_up: int) -> float:
    """Return the relative growth after the warm-up; there is one value for each step."""
    window = max(len(values) // 20, 1)
    before = statistics.median(values[warm_up : warm_up + window])
    return statistics.median(values[-window:]) / before - 1


def read_memory_each_step(trainer: Trainer, server: Server) -> list[dict[str, Memory]]:
    """Return one reading for each step, by program; returns when the trainer ends."""
    assert server.process is not None
    readings: list[dict[str, Memory]] = []
    while trainer.is_running:
        steps = sum("trained" in event for event in trainer.events())
        if steps > len(readings):
            reading = {"trainer": memory_of(trainer.process.pid), "server": memory_of(server.process.pid)}
            readings += [reading] * (steps - len(readings))
        time.sleep(0.1)
    return readings


def by_process(readings: Sequence[dict[str, Memory]], program: str, warm_up: int) -> dict[str, list[int]]:
    """Return the values of each process that exists from the end of the warm-up to the last step."""
    lasting = set.intersection(*(set(reading[program]) for reading in readings[warm_up:]))
    return {name: [reading[program].get(name, 0) for reading in readings] for name in sorted(lasting)}


def main() -> int:
    parser = script_parser(__doc__, "soak", steps=500)
    parser.add_argument("--warm_up", type=int, default=100,
                        help="first steps, which growth leaves out (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    work, model, dataset = make_inputs(args.work, rows=64)
    port, rendezvous = free_ports(2)
    server = Server(model, port, work / "server.txt")
    flags = ["--train_iters", str(args.steps), "--save_steps", str(args.steps + 1), "--global_batch_size", "4",
             "--max_completion_length", "8", "--rollout_dump", str(work / "rollouts")]  # fmt: skip
    trainer = None
    try:
        server.start()
        server.wait()
        trainer = Trainer.start(work / "soak", model, dataset, [server], 1, rendezvous, flags, {})
        began = time.monotonic()
        readings = read_memory_each_step(trainer, server)
        seconds = time.monotonic() - began
        trainer.check_exit("" if len(readings) >= args.steps else f"the run ended after {len(readings)} steps")
    finally:
        if trainer is not None:
            trainer.kill()
        server.kill()
    growths = {}
    report: dict[str, object] = {"steps": args.steps, "warm_up": args.warm_up, "seconds": round(seconds)}
    for program in ("trainer", "server"):
        processes = by_process(readings, program, args.warm_up)
        total = [sum(reading[program].values()) for reading in readings]  # also of processes that start later
        growths[program] = growth(total, args.warm_up)
        print(f"{program}: {total[args.warm_up] / 2**20:.1f} MiB after {args.warm_up} steps, "
              f"{total[-1] / 2**20:.1f} MiB after {args.steps}: {growths[program]:+.2%}")  # fmt: skip
        for name, values in processes.items():
            print(f"    {name}: {values[args.warm_up] / 2**20:.1f} -> {values[-1] / 2**20:.1f} MiB")
        every = max(args.steps // 100, 1)
        report[program] = {
            "growth": round(growths[program], 5),
            "MiB by process, every few steps": {
                name: [round(value / 2**20, 1) for value in values[::every]] for name, values in processes.items()
            },
        }
    if args.json is not None:
        args.json.write_text(json.dumps(report) + "\n")
    return 0 if max(growths.values()) < ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
