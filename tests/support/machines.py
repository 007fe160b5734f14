"""Two machines for tests: namespaces of this one where it allows them, each with its network and name, else processes.

A cable, which is a pair of veth interfaces, joins the networks of the namespaces. All belong to one user namespace, so
they need no rights of this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil
import pytest

from tests.forking.client import ForkedProcess, fork_server, free_port
from tests.paths import IMPORT_PATH
from tests.support.runs import environment_of_processes

_TOOLS = ("unshare", "nsenter", "ip", "hostname", "mount")
_IN_ALL = ("--preserve-credentials", "--user", "--net", "--uts", "--mount")
_NAMES, ADDRESSES = ("machine-a", "machine-b"), ("10.77.0.1", "10.77.0.2")
_NOWHERE = "02:00:00:00:00:77"  # no interface has this address


@dataclass
class Started:
    """A command on a machine."""

    leader: ForkedProcess | subprocess.Popen[str]
    output: IO[str]

    def finish(self, seconds: float) -> tuple[int, str]:
        """Wait until it has ended; return its exit code and all output."""
        code = self.leader.wait(timeout=seconds)
        with self.output:
            self.output.seek(0)
            return code, self.output.read()

    def so_far(self) -> str:
        """Return all output until now."""
        return os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0).decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes at once."""
        if self.leader.poll() is None:
            leader = psutil.Process(self.leader.pid)
            for process in [leader, *leader.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


class Machines(ABC):
    """Machines 0 and 1 of a run."""

    names: tuple[str, str]
    address: str  # of machine 0, for both
    port: int  # that nothing uses there
    run_when_cut: bool  # False: a machine that is cut off does nothing

    def __init__(self) -> None:
        self._started: dict[int, list[Started]] = {0: [], 1: []}

    def torchrun(self, number: int, script: Path, *flags: str, folder: Path, **environ: str) -> Started:
        """Start torchrun with a rank, in a fork that has imported what the rank imports."""
        torchrun = Path(sys.executable).with_name("torchrun")
        words = [*self.place(number), "torchrun", str(torchrun), "--nnodes", "2", "--nproc_per_node", "1",
                 "--node_rank", str(number), "--master_addr", self.address, "--master_port", str(self.port),
                 str(script), *flags]  # fmt: skip
        output, variables = _memory(), {"PYTHONPATH": IMPORT_PATH, **environ}
        leader = fork_server("trainer").start(words[0], words[1:], 0, folder, output, variables)
        return self._add(number, Started(leader, output))

    def command(self, number: int, *words: str, folder: Path, **environ: str) -> Started:
        """Start a command as a user does."""
        variables = {"NNODES": "2", "NODE_RANK": str(number), "NPROC_PER_NODE": "1", "MASTER_ADDR": self.address,
                     "MASTER_PORT": str(self.port)}  # fmt: skip
        output = _memory()
        process = subprocess.Popen(
            [*self.prefix(number), *words], env={**environment_of_processes(), **variables, **environ}, cwd=folder,
            text=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return self._add(number, Started(process, output))

    def _add(self, number: int, started: Started) -> Started:
        self._started[number].append(started)
        return started

    def kill(self, number: int) -> None:
        """Kill all processes of a machine at once."""
        self._signal(number, signal.SIGKILL)

    def _signal(self, number: int, name: signal.Signals) -> None:
        for started in self._started[number]:
            started.signal(name)

    @abstractmethod
    def place(self, number: int) -> list[str]:
        """Return the words with which a program of a fork server runs on a machine."""

    @abstractmethod
    def prefix(self, number: int) -> list[str]:
        """Return the words with which a command runs on a machine."""

    @abstractmethod
    def cut(self, number: int) -> None:
        """Cut the link of a machine."""

    @abstractmethod
    def join(self, number: int) -> None:
        """Undo this."""


def _memory() -> IO[str]:
    """Return a file for output, because nothing reads a pipe meanwhile."""
    return os.fdopen(os.memfd_create("output"), "w+")


class Processes(Machines):
    """Two machines that are processes of this one: the link of one that is cut off is replaced by SIGSTOP."""

    run_when_cut = False
    address = "127.0.0.1"

    def __init__(self) -> None:
        super().__init__()
        self.names = (socket.gethostname(), socket.gethostname())
        self.port = free_port()

    def place(self, number: int) -> list[str]:
        return []

    def prefix(self, number: int) -> list[str]:
        return []

    def cut(self, number: int) -> None:
        self._signal(number, signal.SIGSTOP)

    def join(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)


class Namespaces(Machines):
    """Two machines that are namespaces, in which commands and forks run."""

    names, run_when_cut = _NAMES, True
    address, port = _NAMES[0], 29500

    def __init__(self, holders: list[int], etc: Path) -> None:
        """Build the network. `holders`: a process in the namespaces of each machine; `etc`: an empty folder."""
        super().__init__()
        self._holders = holders
        hosts = etc / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, _NAMES, strict=True)))
        self.run(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(holders[1]))
        for number, (name, address) in enumerate(zip(_NAMES, ADDRESSES, strict=True)):
            self.run(number, "hostname", name)
            self.run(number, "mount", "--bind", str(hosts), "/etc/hosts")
            self.run(number, "ip", "link", "set", "lo", "up")
            self.run(number, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self.run(number, "ip", "link", "set", "eth0", "up")

    def place(self, number: int) -> list[str]:
        return ["in namespaces", str(self._holders[number])]

    def prefix(self, number: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[number]), *_IN_ALL, "--wd=."]

    def run(self, number: int, *command: str) -> None:
        """Run a command that sets up a machine."""
        subprocess.run([*self.prefix(number), *command], check=True, capture_output=True, text=True)

    def cut(self, number: int) -> None:
        self.run(number, "ip", "link", "set", "eth0", "down")

    def join(self, number: int) -> None:
        self.run(number, "ip", "link", "set", "eth0", "up")

    def lose_packets(self, number: int) -> None:
        """Lose all that a machine sends, of which it sees nothing."""
        to = ADDRESSES[1 - number]
        self.run(number, "ip", "neighbour", "replace", to, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def deliver_packets(self, number: int) -> None:
        self.run(number, "ip", "neighbour", "delete", ADDRESSES[1 - number], "dev", "eth0")


@contextmanager
def two_machines(etc: Path) -> Iterator[Machines]:
    """Make two namespaces where this machine allows them, else processes."""
    if why_no_namespaces() is None:
        with namespaces(etc) as machines:
            yield machines
    else:
        with ended(Processes()) as processes:
            yield processes


@contextmanager
def ended(machines: Machines) -> Iterator[Machines]:
    """Kill after this block what still runs."""
    try:
        yield machines
    finally:
        for number in (0, 1):
            machines.kill(number)


@contextmanager
def namespaces(etc: Path) -> Iterator[Namespaces]:
    """Make two machines that end with this block or process. `etc`: an empty folder for their files."""
    first = _holder("--map-root-user", "--user")
    try:
        second = _holder(inside=first.pid)
        try:
            machines = Namespaces([first.pid, second.pid], etc)
            with ended(machines):
                yield machines
        finally:
            second.communicate()
    finally:
        first.communicate()


def _holder(*options: str, inside: int | None = None) -> subprocess.Popen[str]:
    """Start a process in new namespaces, which ends with its input."""
    user = [] if inside is None else ["nsenter", "--target", str(inside), "--preserve-credentials", "--user"]
    wait = ["sh", "-c", "echo ready; exec cat"]
    holder = subprocess.Popen([*user, "unshare", *options, "--net", "--uts", "--mount", *wait], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise OSError(holder.communicate()[1].strip())
    return holder


@cache
def why_no_namespaces() -> str | None:
    """Return why this machine has no namespaces for two machines; None: it has."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {', '.join(missing)}"
    try:
        with TemporaryDirectory() as etc, namespaces(Path(etc)):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"namespaces are not allowed here: {said}"
    return None


needs_namespaces = pytest.mark.skipif(why_no_namespaces() is not None, reason=str(why_no_namespaces()))
