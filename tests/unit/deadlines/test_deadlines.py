"""Code that exceeds its deadline is interrupted, or its process ends with a report; code on time is not affected."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift_megatron_grpo.deadlines.collectives import format_entries
from swift_megatron_grpo.deadlines.interrupt import DeadlineExceeded, interrupted_after
from tests.paths import REPOSITORY

RANK = Path(__file__).with_name("stuck_rank.py")


def start(how: str, report: Path, rank: int = 0, world_size: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, str(RANK), how, str(report), str(rank), str(world_size)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_all_ranks_end_if_one_is_stuck(tmp_path: Path) -> None:
    """One rank holds the interpreter's lock in C code, so its own process cannot detect it; the other only waits."""
    report = tmp_path / "stuck.txt"
    ranks = [start("holds", report, 0, 2), start("waits", report, 1, 2)]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * 2
    assert re.search(r"rank 0 is stuck: phase train has not finished after 1 s \(--phase_timeout 1\)", errors[0])
    assert str(report) in errors[0] and "use a larger --phase_timeout" in errors[0]
    sections = re.split("^==== ", report.read_text(), flags=re.MULTILINE)[1:]
    assert sorted(section[:11] for section in sections) == ["rank 0 of 2", "rank 1 of 2"]
    stuck, other = sorted(sections)
    assert "hold_the_interpreter" in stuck and "something holds the interpreter's lock" in stuck
    assert "stopped because another rank is stuck" in other and "phase train: since" in other
    assert "in main" in other and "collectives: none recorded" in other


def test_a_left_over_thread_does_not_keep_a_failed_run_alive(tmp_path: Path) -> None:
    rank = start("left behind", tmp_path / "stuck.txt")
    error = rank.communicate(timeout=90)[1]
    assert rank.returncode == -signal.SIGKILL
    assert "ValueError: a step failed" in error and "the exit of the process after the error above" in error


@pytest.mark.alone
def test_phases_within_their_limit_are_not_reported(tmp_path: Path) -> None:
    """Twenty phases together take longer than the limit of one."""
    rank = start("fine", tmp_path / "stuck.txt")
    assert rank.communicate(timeout=60)[1] == "" and rank.returncode == 0
    assert not (tmp_path / "stuck.txt").exists()


def test_the_monitor_exits_with_its_rank(tmp_path: Path) -> None:
    rank = start("waits", tmp_path / "stuck.txt")
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
    while not (monitor := children.read_text().split()):
        time.sleep(0.1)
    rank.kill()
    rank.communicate()
    end = time.monotonic() + 10
    while Path(f"/proc/{monitor[0]}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{monitor[0]}").exists()


def test_a_sleep_and_a_loop_are_interrupted() -> None:
    for work in (lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded), interrupted_after(0.2):
            work()
        assert time.monotonic() - began < 5


def test_code_that_catches_every_exception_is_interrupted() -> None:
    caught = []
    with pytest.raises(DeadlineExceeded), interrupted_after(0.2):
        for _ in range(2):
            try:
                time.sleep(60)
            except BaseException as error:
                caught.append(error)
    assert len(caught) == 2  # interrupted again after a second, and raised at the end of the block


def test_signal_handlers_are_restored() -> None:
    handlers = [signal.getsignal(number) for number in range(1, 64)]
    with interrupted_after(60):
        pass
    assert [signal.getsignal(number) for number in range(1, 64)] == handlers


def entry(name: str, created: int, retired: bool) -> dict[str, object]:
    return {"profiling_name": name, "input_sizes": [[3]], "process_group": ["1", "TENSOR"], "retired": retired,
            "state": "scheduled", "time_created_ns": created}  # fmt: skip


def test_unfinished_collectives_are_listed() -> None:
    report = format_entries([entry("gloo:b", 2, False), entry("gloo:a", 1, True)], now=2_000_000_002)
    assert report.splitlines() == [
        "collectives, not finished: 1",
        "  gloo:b of [[3]] in group 1 TENSOR, 2.0 s ago",
        "last finished: gloo:a of [[3]] in group 1 TENSOR, 2.0 s ago",
    ]
