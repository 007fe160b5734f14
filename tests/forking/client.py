"""Start processes of the tests as forks of a preloaded one; they behave like subprocess.Popen of the same command."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import SystemRandom
from typing import IO, Any

from tests.paths import IMPORT_PATH, REPOSITORY

_SOCKETS = "TESTS_FORK_SERVERS"  # their folder; scripts/test.sh sets it, so that its stages share the servers
_OWNER = "TESTS_FORK_OWNER"  # the process that they end with
_FIRST_KIND = "torch"
BELOW_EPHEMERAL_PORTS = (15000, 30000)
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}


class ForkedProcess:
    """The leader of one run: its process group holds every process of the run."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the leader and return its exit code, as subprocess does."""
        if self.returncode is None:
            if timeout is not None and not _readable(self._status, timeout):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            code = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(code) if code else self._code_of_sudden_end()
        return self.returncode

    def fileno(self) -> int:
        """Return what becomes readable when the leader ends."""
        return self._status

    def _code_of_sudden_end(self) -> int:
        """Read it from the kernel, unless the server has reaped the process, at another request of this client."""
        stat = Path(f"/proc/{self.pid}/stat")
        with suppress(OSError):
            while (fields := stat.read_text().rpartition(")")[2].split())[0] != "Z":
                time.sleep(0.01)
            return os.waitstatus_to_exitcode(int(fields[49]))
        return -signal.SIGKILL

    def poll(self) -> int | None:
        if self.returncode is None and _readable(self._status, 0):
            self.wait()
        return self.returncode


class ForkServer:
    """A preloaded process, of one kind of programs.py, that forks runs on request."""

    def __init__(self, kind: str) -> None:
        """Connect to the server of this session or of scripts/test.sh; the first process that needs it starts it."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = Path(sockets_folder()) / kind
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
                _start_server(kind, path)
                self._connection.connect(str(path))

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        ranks: int,
        folder: Path,
        output: IO[Any],
        environment: Mapping[str, str],
        kills_ranks: bool = False,
        more_streams: Sequence[IO[Any]] = (),
    ) -> ForkedProcess:
        """Start a program of programs.py; with 0 ranks, a command without torchrun.

        With `kills_ranks` SIGKILL ends the other ranks once one has failed, as in torchrun with this package, and not
        SIGTERM, which lets them print more. `more_streams` are those of input and of errors, if it needs its own.
        """
        request = {"program": program, "arguments": list(arguments), "ranks": ranks, "folder": str(folder),
                   "environment": dict(environment), "port": free_port(), "kills_ranks": kills_ranks}  # fmt: skip
        status, server_status = os.pipe()
        descriptors = [output.fileno(), server_status, *(stream.fileno() for stream in more_streams)]
        socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
        os.close(server_status)
        return ForkedProcess(self._receive()["pid"], status)

    def _receive(self) -> dict[str, Any]:
        data = self._connection.recv(2**16)
        if not data:
            raise RuntimeError("the fork server has ended")
        message: dict[str, Any] = json.loads(data)
        return message


@cache
def fork_server(kind: str) -> ForkServer:
    """Return the preloaded process of this session; the first call takes 10 to 20 s, for the imports."""
    return ForkServer(kind)


def _start_server(kind: str, path: Path) -> None:
    """Start a server and wait until it has imported everything. It is a fork of one that has imported less."""
    arguments = [kind, str(path), os.environ[_OWNER]]
    process: subprocess.Popen[bytes] | ForkedProcess
    if kind == _FIRST_KIND:
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": IMPORT_PATH}
        # in its own session, because the group of the worker that starts it is killed when that worker ends
        process = subprocess.Popen([sys.executable, "-m", "tests.forking.server", *arguments], cwd=REPOSITORY,
                                   env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr,
                                   start_new_session=True)  # fmt: skip
    else:
        parent = fork_server(_FIRST_KIND if kind == "plain" else "plain")
        process = parent.start("server", arguments, 0, REPOSITORY, sys.stderr, {})
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the fork server of kind {kind} ended with exit code {process.returncode}")
        time.sleep(0.05)


def sockets_folder() -> str:
    """Return the folder of the servers' sockets. Child processes, such as pytest's workers, share it."""
    if _SOCKETS not in os.environ:
        os.environ[_SOCKETS] = tempfile.mkdtemp(prefix="fork-servers-")
        os.environ[_OWNER] = str(os.getpid())
        atexit.register(shutil.rmtree, os.environ[_SOCKETS], ignore_errors=True)
    return os.environ[_SOCKETS]


def run_script(script: Path, *arguments: object, ranks: int = 0, kind: str = "plain") -> str:
    """Run a script in a fork, or in one per rank, and return its output. Plain: it has imported only transformers."""
    return _output(kind, "script", str(script), *map(str, arguments), ranks=ranks)


def run_python(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run `python ARGUMENTS` in a fork that has imported transformers; return the exit code and all output."""
    done = python(*arguments, kind="plain", **environment)
    return done.returncode, done.stdout + done.stderr


def python(*arguments: str, kind: str = "torch", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, which begin with a file, -c or -m, in a fork that has imported torch or more."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        streams = (nothing, errors)
        process = fork_server(kind).start("python", arguments, 0, REPOSITORY, output, environment, more_streams=streams)
        code = process.wait()
        for stream in (output, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def start_piped(
    kind: str, program: str, *arguments: str, folder: Path = REPOSITORY, **environment: str
) -> tuple[ForkedProcess, IO[str]]:
    """Start a program in a fork; return also a pipe with its output, which ends with the last process that has it."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        process = fork_server(kind).start(program, arguments, 0, folder, output, environment)
    return process, os.fdopen(read)


def run_code(kind: str, code: str, *arguments: str, folder: Path = REPOSITORY, ranks: int = 0) -> str:
    """Run code in a fork, or in one per rank, and return its output."""
    return _output(kind, "code", code, *arguments, folder=folder, ranks=ranks)


def _output(kind: str, program: str, *arguments: str, folder: Path = REPOSITORY, ranks: int = 0) -> str:
    with tempfile.TemporaryFile("w+") as output:
        process = fork_server(kind).start(program, arguments, ranks, folder, output, {})
        code = process.wait()
        output.seek(0)
        printed = output.read()
    if code != 0:
        raise RuntimeError(f"{program} {arguments[0]} ended with exit code {code}:\n{printed[-4000:]}")
    return printed


def free_port() -> int:
    """Return a port that nothing uses, and that the kernel gives to no connection of another test meanwhile."""
    while True:
        port = SystemRandom().randrange(*BELOW_EPHEMERAL_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _readable(descriptor: int, timeout: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])
