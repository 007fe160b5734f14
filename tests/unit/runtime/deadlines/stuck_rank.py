"""A process that hangs or ends under a watchdog. Arguments: what it does, the report, its rank, the world size."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from swift_megatron_grpo.runtime.deadlines.watchdog import Watchdog


def hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # exponential time, in C, without releasing the lock


def fork_and_exit() -> None:
    if os.fork() == 0:  # keeps the descriptors that it inherited open
        os.closerange(1, 3)
        time.sleep(5)
        os._exit(0)
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(3),
    "forks": fork_and_exit,
    "crashes": lambda: ctypes.string_at(0),
    "killed": kill_itself,
}


def stop_the_monitor(watchdog: Watchdog, report: str) -> None:
    """Enter more phases than a pipe could hold while the monitor is stopped; then let it continue."""
    (monitor,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(monitor), signal.SIGSTOP)
    for number in range(5000):
        with watchdog.phase(f"phase {number}"):
            pass
    os.kill(int(monitor), signal.SIGCONT)


def main(how: str, report: str, rank: int, world_size: int) -> None:
    if how == "fine":
        watchdog = Watchdog(Path(report), rank, world_size, phase_timeout=1.5)
        for _ in range(20):
            with watchdog.phase("train"):
                time.sleep(0.1)
        watchdog.close()
        return
    watchdog = Watchdog(Path(report), rank, world_size, 60 if how in ("waits", *ENDS) else 1, exit_timeout=2)
    if how == "left behind":
        threading.Thread(target=time.sleep, args=(3600,), name="left").start()
        raise ValueError("a step failed")
    if how == "stopped monitor":
        stop_the_monitor(watchdog, report)
    with watchdog.phase("train"):
        if how == "holds":
            hold_the_interpreter()
        if how in ENDS:
            with watchdog.limit("reward function Judge", None, "--reward_timeout"):
                ENDS[how]()
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
