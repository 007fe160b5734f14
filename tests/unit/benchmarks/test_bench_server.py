"""The comparison of a server with the training process: its figures, and the end of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.bench_server import InProcess, compared, running, wait_until_up
from benchmarks.harness import free_gpus
from tests.paths import REPOSITORY

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


def test_a_sigterm_ends_the_benchmark_with_what_it_has_started(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from benchmarks.bench_server import running
from benchmarks.harness.processes import exit_at_sigterm
exit_at_sigterm()
with running(["-c", {PARENT!r}, "waits"], Path("log"), pipes=True) as process:
    print(process.stdout.readline(), flush=True)
    process.wait()
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    benchmark = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert benchmark.stdout is not None and benchmark.stdout.readline() == b"READY\n"
    engine = int((tmp_path / "child").read_text())
    assert is_running(engine)
    benchmark.terminate()
    assert benchmark.wait(timeout=30) == 1 and not is_running(engine)


def test_a_gpu_whose_memory_is_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncase $1 in *memory*) cat used ;; *) echo 2992 ;; esac\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(free_gpus, "PATIENCE", 0.0)
    used = tmp_path / "used"
    used.write_text("520\n")
    free_gpus.wait_until_free(["0", "1"])
    used.write_text("29760\n")
    with pytest.raises(SystemExit, match=r"31\.2 GB of GPU 1 are in use by process 2992"):
        free_gpus.wait_until_free(["1"])


def test_an_arm_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    log, open_files = tmp_path / "arm.log", len(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemExit, match=f"has ended; the log is {log}"), running(["-c", ""], log, True) as process:
        InProcess(process, log)
    with pytest.raises(SystemExit, match=f"has not started; the log is {log}"), running(["-c", ""], log) as process:
        wait_until_up(process, 1, log)
    assert len(os.listdir("/proc/self/fd")) == open_files
