"""A fork runs a script as `python SCRIPT` would: environment, streams, exit code and what runs at the exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift_megatron_grpo.platforms.cpu.forks import Fork, run_in_fork

SCRIPT = """
import atexit, os, random, signal, sys, threading, time
atexit.register(print, "at the exit")
print(__name__, sys.argv[1:], os.environ.get("LOCAL_RANK"), "PARENT" in os.environ, os.getpgid(0) == os.getpid())
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
how = sys.argv[1]
if how == "thread":
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
if how == "number":
    sys.exit(3)
if how == "message":
    sys.exit("--lr 0 must be above 0")
if how == "error":
    raise ValueError("a step failed")
if how == "pipe":
    read, write = os.pipe()
    os.close(read)
    sys.stdout = os.fdopen(write, "w")  # nobody reads what is printed, as behind `| head`
    print("lost")
if how == "both pipes":
    read, write = os.pipe()
    os.close(read)
    sys.stdout = sys.stderr = os.fdopen(write, "w", 1)
    print("lost")
if how == "sleep":
    time.sleep(60)
"""


def start(folder: Path, how: str) -> tuple[Fork, Path]:
    (script := folder / "script.py").write_text(SCRIPT)
    output = folder / "output.txt"

    def begin() -> None:
        sys.stdout = sys.stderr = output.open("w")

    return run_in_fork([str(script), how], {"LOCAL_RANK": "1"}, begin), output


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("returns", 0, "at the exit"),
        ("thread", 0, "of a thread\nat the exit"),
        ("number", 3, "at the exit"),
        ("message", 1, "--lr 0 must be above 0\nat the exit"),
        ("error", 1, "ValueError: a step failed\nat the exit"),
    ],
)
def test_a_fork_ends_as_a_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int, last: str
) -> None:
    monkeypatch.setenv("PARENT", "1")
    fork, output = start(tmp_path, how)
    assert fork.wait(60) == code == fork.poll()
    printed = output.read_text()
    assert printed.startswith(f"__main__ ['{how}'] 1 False True\nTrue\n")
    assert printed.endswith(f"{last}\n") and ("Traceback" in printed) == (how == "error")


@pytest.mark.parametrize(("how", "code"), [("pipe", 120), ("both pipes", 1)])
def test_a_fork_whose_output_nobody_reads_ends(tmp_path: Path, how: str, code: int) -> None:
    """An exception at the exit would otherwise continue in the code of the parent, a second time."""
    fork, _ = start(tmp_path, how)
    assert fork.wait(60) == code


def test_a_fork_does_not_keep_a_port_of_its_parent_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        fork, output = start(tmp_path, "sleep")
        wait_for(output)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    fork.send_signal(signal.SIGKILL)
    assert fork.wait(30) == -signal.SIGKILL


def wait_for(output: Path) -> None:
    while not output.exists() or "True" not in output.read_text():
        time.sleep(0.02)


def test_a_fork_can_be_waited_for_and_ended(tmp_path: Path) -> None:
    fork, output = start(tmp_path, "sleep")
    wait_for(output)
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.1)
    fork.send_signal(signal.SIGTERM)
    assert fork.wait(30) == -signal.SIGTERM
    fork.send_signal(signal.SIGTERM)  # as Popen: without effect on another process that may have its number
    assert not os.path.exists(f"/proc/{fork.pid}")
