"""Check that processes end, and with them all that they have started."""

from __future__ import annotations

import os
import signal
import time

import psutil

from tests.support.servers import RolloutServer


def alive_after(seconds: float, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are alive after that time. An orphan in a container may stay a zombie."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(is_alive(process) for process in processes):
        time.sleep(0.05)
    return [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def check_server_ends(server: RolloutServer, number: signal.Signals, from_terminal: bool) -> None:
    """Send a signal to the server, or as a terminal to its process group; all processes must end, with one message."""
    assert server.process is not None
    processes = server.processes()
    assert len(processes) >= 2  # its web server, and the process of the engine
    if from_terminal:  # the engine must not receive it: one that ends first looks like a failure
        assert any(os.getpgid(process.pid) != server.process.pid for process in processes)
    began = time.monotonic()
    os.killpg(server.process.pid, number) if from_terminal else processes[0].send_signal(number)
    assert server.process.wait(timeout=30) == 128 + number
    assert time.monotonic() - began < 10
    assert alive_after(2, processes) == []
    log = server.log.read_text()
    assert log.count(f"the rollout server received {number.name} and ends, with all of its processes") == 1
    assert "Traceback" not in log
