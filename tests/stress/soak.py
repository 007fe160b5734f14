"""Hundreds of tiny steps with a server, and what becomes of the memory of every process.

    python -m tests.stress.soak [--steps 500] [--warm_up 100] [--json FILE] [--work DIR]

One rollout server and a trainer of one rank, on CPUs, with the check after every weight sync on. The resident memory of
each process is read after every step; growth is the median of the last twentieth of the steps against that of as many
after the warm-up. Exit code 1 if all of the server's processes together, or all of the trainer's, have grown by 1 % or
more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.stress.survival.processes import REPOSITORY, Server, Trainer, free_ports, make_inputs

ALLOWED = 0.01
Memory = dict[str, int]  # bytes by process


def memory_of(pid: int) -> Memory:
    """Of the process and all below it. Children that end meanwhile are left out."""
    found: Memory = {}
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with process.oneshot():
                name = f"{process.name()} {process.pid}"
                found[name] = process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return found


def growth(values: Sequence[int], warm_up: int) -> float:
    """Relative. One value for each step."""
    window = max(len(values) // 20, 1)
    before = statistics.median(values[warm_up : warm_up + window])
    return statistics.median(values[-window:]) / before - 1


def watch(trainer: Trainer, server: Server) -> list[dict[str, Memory]]:
    """One reading after each step."""
    assert server.process is not None
    readings: list[dict[str, Memory]] = []
    while trainer.runs:
        steps = sum("trained" in event for event in trainer.noted())
        if steps > len(readings):
            reading = {"trainer": memory_of(trainer.process.pid), "server": memory_of(server.process.pid)}
            readings += [reading] * (steps - len(readings))
        time.sleep(0.1)
    return readings


def by_process(readings: Sequence[dict[str, Memory]], end: str, warm_up: int) -> dict[str, list[int]]:
    """Of those that are there from the end of the warm-up to the last step."""
    lasting = set.intersection(*(set(reading[end]) for reading in readings[warm_up:]))
    return {name: [reading[end].get(name, 0) for reading in readings] for name in sorted(lasting)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warm_up", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "soak")
    args = parser.parse_args()
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model, dataset = make_inputs(work, rows=64)
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
        readings = watch(trainer, server)
        seconds = time.monotonic() - began
        if trainer.process.wait() != 0 or len(readings) < args.steps:
            end = "\n".join(line.text for line in trainer.said[-40:])
            raise RuntimeError(f"the run ended after {len(readings)} steps; the end of its output:\n{end}")
    finally:
        if trainer is not None:
            trainer.end()
        server.kill()
    grown = {}
    story: dict[str, object] = {"steps": args.steps, "warm_up": args.warm_up, "seconds": round(seconds)}
    for end in ("trainer", "server"):
        processes = by_process(readings, end, args.warm_up)
        total = [sum(reading[end].values()) for reading in readings]  # also of those that come and stay
        grown[end] = growth(total, args.warm_up)
        print(f"{end}: {total[args.warm_up] / 2**20:.1f} MiB after {args.warm_up} steps, {total[-1] / 2**20:.1f} MiB "
              f"after {args.steps}: {grown[end]:+.2%}")  # fmt: skip
        for name, values in processes.items():
            print(f"    {name}: {values[args.warm_up] / 2**20:.1f} -> {values[-1] / 2**20:.1f} MiB")
        every = max(args.steps // 100, 1)
        story[end] = {
            "growth": round(grown[end], 5),
            "MiB by process, every few steps": {
                name: [round(value / 2**20, 1) for value in values[::every]] for name, values in processes.items()
            },
        }
    if args.json is not None:
        args.json.write_text(json.dumps(story) + "\n")
    return 0 if max(grown.values()) < ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
