"""Start processes of the tests as forks of a preloaded one; they behave like subprocess.Popen of the same command."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.paths import REPOSITORY

OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}


class ForkedProcess:
    """The leader of one run: its process group holds every process of the run."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the leader and return its exit code, -9 if it was killed."""
        if self.returncode is None:
            if timeout is not None and not _readable(self._status, timeout):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            code = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(code) if code else -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and _readable(self._status, 0):
            self.wait()
        return self.returncode


class ForkServer:
    """A preloaded process, of one kind of programs.py, that forks runs on request."""

    def __init__(self, kind: str) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forking.server", kind, str(far.fileno())]
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[far.fileno()])
        far.close()
        self._connection = near
        atexit.register(self.stop)
        self._receive()  # the server has imported everything

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        ranks: int,
        folder: Path,
        output: IO[Any],
        environment: Mapping[str, str],
    ) -> ForkedProcess:
        """Start a program of programs.py; with 0 ranks, a command without torchrun."""
        request = {"program": program, "arguments": list(arguments), "ranks": ranks, "folder": str(folder),
                   "environment": dict(environment), "port": free_port()}  # fmt: skip
        status, server_status = os.pipe()
        socket.send_fds(self._connection, [json.dumps(request).encode()], [output.fileno(), server_status])
        os.close(server_status)
        return ForkedProcess(self._receive()["pid"], status)

    def stop(self) -> None:
        self._connection.close()
        self._process.wait(timeout=30)

    def _receive(self) -> dict[str, Any]:
        data = self._connection.recv(2**16)
        if not data:
            raise RuntimeError(f"the fork server ended with exit code {self._process.wait(timeout=30)}")
        message: dict[str, Any] = json.loads(data)
        return message


@cache
def fork_server(kind: str) -> ForkServer:
    """Return the preloaded process of this test process; the first call takes 20 s, for the imports."""
    return ForkServer(kind)


def run_script(script: Path, *arguments: object) -> str:
    """Run a script of plain transformers in a fork and return its output."""
    with tempfile.TemporaryFile("w+") as output:
        process = fork_server("plain").start("script", [str(script), *map(str, arguments)], 0, REPOSITORY, output, {})
        code = process.wait()
        output.seek(0)
        printed = output.read()
    if code != 0:
        raise RuntimeError(f"{script.name} ended with exit code {code}:\n{printed[-4000:]}")
    return printed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _readable(descriptor: int, timeout: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])
