"""The comparison of a server with the training process: its figures, and the end of its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.bench_server import InProcess, compared, running, wait_until_up

# A process that starts another one, writes its id, and then does what its argument asks for.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("child", "w").write(str(child.pid))
print("READY", flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_ratio_is_the_time_behind_the_server_over_that_in_the_process() -> None:
    rounds = {"in_process": [2.0, 4.0, 100.0], "server": [5.0, 1.0, 50.0]}
    found = compared({arm: [{"seconds": seconds} for seconds in times] for arm, times in rounds.items()})
    assert found == {"seconds": {"in_process": 4.0, "server": 5.0}, "ratio": 1.25}


@pytest.mark.parametrize("how", ["waits", "ends"])
def test_a_failure_ends_an_arm_with_what_it_has_started(tmp_path: Path, how: str) -> None:
    with (
        pytest.raises(RuntimeError, match="another arm failed"),
        running(["-c", PARENT, how], tmp_path / "log", pipes=True) as process,
    ):
        InProcess(process, tmp_path / "log")
        while how == "ends" and process.poll() is None:
            time.sleep(0.05)
        raise RuntimeError("another arm failed")
    assert not is_running(process.pid) and not is_running(int((tmp_path / "child").read_text()))
    assert process.stdin is not None and process.stdin.closed and process.stdout is not None and process.stdout.closed


def test_an_arm_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    log, open_files = tmp_path / "arm.log", len(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemExit, match=f"has ended; the log is {log}"), running(["-c", ""], log, True) as process:
        InProcess(process, log)
    with pytest.raises(SystemExit, match=f"has not started; the log is {log}"), running(["-c", ""], log) as process:
        wait_until_up(process, 1, log)
    assert len(os.listdir("/proc/self/fd")) == open_files
