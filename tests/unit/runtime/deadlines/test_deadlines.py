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

from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded, interrupted_after
from swift_megatron_grpo.runtime.deadlines.watchdog import format_entries
from tests.forking.client import start_piped
from tests.paths import IMPORT_PATH

RANK = Path(__file__).with_name("stuck_rank.py")


class Rank:
    """A process of stuck_rank.py, forked from one that has imported torch."""

    def __init__(self, how: str, report: Path, rank: int = 0, world_size: int = 1) -> None:
        arguments = [str(RANK), how, str(report), str(rank), str(world_size)]
        self.process, self._errors = start_piped("torch", "script", *arguments)

    def end(self, timeout: float = 60) -> tuple[int, str]:
        """Return the exit code, and what the rank and its monitor have printed."""
        code = self.process.wait(timeout)
        with self._errors:
            return code, self._errors.read()


def test_all_ranks_end_if_one_is_stuck(tmp_path: Path) -> None:
    """One rank holds the interpreter's lock in C code, so its own process cannot detect it; the other only waits."""
    report = tmp_path / "stuck.txt"
    ranks = [Rank("holds", report, 0, 2), Rank("waits", report, 1, 2)]
    codes, errors = zip(*(rank.end() for rank in ranks), strict=True)
    assert codes == (-signal.SIGKILL,) * 2
    assert re.search(r"rank 0 is stuck: phase train has not finished after 1 s \(--phase_timeout 1\)", errors[0])
    assert str(report) in errors[0] and "use a larger --phase_timeout" in errors[0]
    sections = re.split("^==== ", report.read_text(), flags=re.MULTILINE)[1:]
    assert sorted(section[:11] for section in sections) == ["rank 0 of 2", "rank 1 of 2"]
    stuck, other = sorted(sections)
    assert "hold_the_interpreter" in stuck and "something holds the interpreter's lock" in stuck
    assert "stopped because another rank is stuck" in other and "phase train: since" in other
    assert "in main" in other and "collectives: none recorded" in other


def test_a_left_over_thread_does_not_keep_a_failed_run_alive(tmp_path: Path) -> None:
    # In a new interpreter, which waits for threads when it exits; a fork does not.
    command = [sys.executable, str(RANK), "left behind", str(tmp_path / "stuck.txt"), "0", "1"]
    rank = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": IMPORT_PATH}, stderr=subprocess.PIPE, text=True)
    error = rank.communicate(timeout=90)[1]
    assert rank.returncode == -signal.SIGKILL
    assert "ValueError: a step failed" in error and "the exit of the process after the error above" in error


@pytest.mark.alone
def test_phases_within_their_limit_are_not_reported(tmp_path: Path) -> None:
    """Twenty phases together take longer than the limit of one."""
    assert Rank("fine", tmp_path / "stuck.txt").end() == (0, "")
    assert not (tmp_path / "stuck.txt").exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_monitor_exits_with_its_rank(tmp_path: Path, stopped: bool) -> None:
    rank = Rank("waits", tmp_path / "stuck.txt")
    pid = rank.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (monitor := children.read_text().split()):
        time.sleep(0.1)
    while "monitor.py" not in (command := Path(f"/proc/{monitor[0]}/cmdline")).read_text():
        time.sleep(0.1)
    time.sleep(1)  # it has imported its modules
    if stopped:
        os.kill(int(monitor[0]), signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    rank.process.wait()
    end = time.monotonic() + 2
    while _is_alive(monitor[0]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_alive(monitor[0]), command


def _is_alive(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize("fault", ["no folder", "disk full", "no response"])
def test_a_stuck_rank_is_killed_if_the_report_cannot_be_written(tmp_path: Path, fault: str) -> None:
    report = tmp_path / "removed" / "stuck.txt" if fault == "no folder" else tmp_path / "stuck.txt"
    if fault == "disk full":
        report.symlink_to("/dev/full")
    if fault == "no response":
        os.mkfifo(report)  # without a reader, opening it takes forever
    code, error = Rank("hangs", report).end()
    assert code == -signal.SIGKILL
    reason = {"no folder": "FileNotFoundError", "disk full": "No space left", "no response": "does not respond"}
    assert f"the report {report} cannot be written: " in error and reason[fault] in error
    assert "==== rank 0 of 1" in error and "in main" in error and "phase train: since" in error


def test_a_stopped_monitor_blocks_no_rank_and_resumes_with_newest_limits(tmp_path: Path) -> None:
    code, error = Rank("stopped monitor", tmp_path / "stuck.txt").end()
    assert code == -signal.SIGKILL
    assert "rank 0 is stuck: phase train has not finished after 1 s" in error


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exits", 3, "with exit code 3"),
        ("forks", 3, "with exit code 3"),
        ("crashes", -signal.SIGSEGV, "by SIGSEGV"),
        ("killed", -signal.SIGKILL, None),
    ],
)
def test_the_function_in_which_a_rank_ends_is_named(tmp_path: Path, how: str, code: int, message: str | None) -> None:
    ended, error = Rank(how, tmp_path / "stuck.txt").end()
    assert ended == code
    line = f"rank 0 ended {message} during reward function Judge: the function called os._exit, or it crashed in C"
    assert (line in error) == (message is not None), error
    assert message is not None or "Judge" not in error


def test_a_sleep_and_a_loop_are_interrupted() -> None:
    for work in (lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded), interrupted_after(0.2):
            work()
        assert time.monotonic() - began < 5


def test_code_is_interrupted_when_it_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded), interrupted_after(None, lambda: time.monotonic() > began + 0.2):
        time.sleep(60)
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
