"""A process that this one starts and watches: the torchrun of a machine's ranks, or a rollout server."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from swift_megatron_grpo.launch.member import State
from swift_megatron_grpo.plugin.torchrun import FAILURE_VARIABLE

# The process gets SIGTERM when the thread that started it ends, also at SIGKILL. It begins with no signal blocked.
_BEGIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A member on this machine. Its process leads a process group."""

    def __init__(self, name: str, host: str, own: Mapping[str, str]) -> None:
        """Run on this machine. `host`: its address; `own`: its variables, before those of the run."""
        self.name, self._host, self._own = name, host, own
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready, self._ends, self._restarts = False, False, 0

    def place(self) -> tuple[str, int]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family) as taken:
            return self._host, taken.getsockname()[1]

    def start(self, words: Sequence[str], environ: Mapping[str, str], folder: str, health: str | None) -> None:
        """Start `python WORDS`. If `health` is set, that is a server, which is started again if it ends once ready."""
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{socket.gethostname()} has no folder {folder}, in which the run was started; start it in a folder "
                "that every machine has"
            )
        self._says = Path(tempfile.gettempdir()) / f"swift_megatron_grpo-{secrets.token_hex(8)}"
        self._environ = {**self._own, **environ, FAILURE_VARIABLE: str(self._says)}
        self._words, self._folder, self._health = words, folder, health
        self._begin()

    def _begin(self) -> None:
        words = [sys.executable, "-c", _BEGIN, str(os.getpid()), sys.executable, *self._words]
        self._process = subprocess.Popen(words, env=self._environ, cwd=self._folder, process_group=0)

    @property
    def has_started(self) -> bool:
        return self._process is not None

    def state(self) -> State:
        if self._process is None:
            return State(128 + signal.SIGTERM if self._ends else None)
        code = self._process.poll()
        if code is None:
            self._was_ready = self._was_ready or self._answers()
            return State(restarts=self._restarts)
        if self._was_ready and not self._ends:
            self._restarts, self._was_ready = self._restarts + 1, False
            self._begin()
            return State(restarts=self._restarts)
        said = self._says.read_text(encoding="utf-8") if self._says.is_file() else ""
        return State(code if code >= 0 else 128 - code, said, self._restarts)

    def _answers(self) -> bool:
        """Return True if the process is a server, and ready."""
        if self._health is None:
            return False
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(self._health, timeout=1):
                return True
        return False

    def stop(self) -> None:
        self._ends = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._ends = True
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._says.unlink(missing_ok=True)
