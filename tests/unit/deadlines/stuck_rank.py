"""A process that hangs under a watchdog. Arguments: the way it hangs, the report, its rank, the world size."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

from swift_megatron_grpo.deadlines.watchdog import Watchdog


def hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # exponential time, in C, without releasing the lock


def main(how: str, report: str, rank: int, world_size: int) -> None:
    if how == "fine":
        watchdog = Watchdog(Path(report), rank, world_size, phase_timeout=1.5)
        for _ in range(20):
            with watchdog.phase("train"):
                time.sleep(0.1)
        watchdog.close()
        return
    watchdog = Watchdog(Path(report), rank, world_size, 60 if how == "waits" else 1, exit_timeout=2)
    if how == "left behind":
        threading.Thread(target=time.sleep, args=(3600,), name="left").start()
        raise ValueError("a step failed")
    with watchdog.phase("train"):
        if how == "holds":
            hold_the_interpreter()
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
