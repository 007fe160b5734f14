"""Start `swift rollout`, forked or by the real command, in a process group that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swift_megatron_grpo.generation.protocol.messages import RunIdentity
from tests.forking.client import ForkedProcess, fork_server, free_port
from tests.support.runs import ON_CPU, SMALL_CACHE, environment_of_processes, template_of

HOST = "127.0.0.1"
KEY = "a key for tests"


def _command() -> list[str]:
    script = Path(sys.executable).with_name("swift")
    # packages in a separate folder have no scripts next to the interpreter
    return (
        [str(script), "rollout"] if script.exists() else [sys.executable, "-m", "swift_megatron_grpo.generation.server"]
    )


@dataclass
class RolloutServer:
    model: Path
    log: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    command: bool = False  # start the real `swift rollout` instead of a fork
    key: str | None = KEY
    host: str = HOST
    place: Sequence[str] = ()  # of the machine on which a fork runs (support/machines.py)
    process: subprocess.Popen[str] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> RolloutServer:
        """Start the server and return at once; `wait` returns when it responds."""
        key = [] if self.key is None else ["--api_key", self.key]
        host = [] if self.host == HOST else ["--host", self.host]  # the default
        model_type = json.loads((self.model / "config.json").read_text())["model_type"]
        arguments = ["--model", str(self.model), "--model_type", model_type, "--template", template_of(self.model),
                     *host, "--port", str(self.port), *key, "--torch_dtype", "float32",
                     "--vllm_max_model_len", "256", "--vllm_enforce_eager", "true",
                     "--vllm_gpu_memory_utilization", "0.3", *SMALL_CACHE, *self.flags]  # fmt: skip
        with self.log.open("a") as log:
            if ON_CPU and not self.command:
                program, *rest = [*self.place, "swift rollout", *arguments]
                self.process = fork_server("rollout").start(program, rest, 0, self.log.parent, log, self.environment)
            else:
                environment = {**environment_of_processes(), **self.environment}
                self.process = subprocess.Popen([*_command(), *arguments], env=environment, text=True,
                                                cwd=self.log.parent, stdout=log, stderr=subprocess.STDOUT,
                                                start_new_session=True)  # fmt: skip
        return self

    def wait(self, seconds: float = 600) -> RolloutServer:
        """Wait until the server responds; kill it if it does not."""
        try:
            return self._wait(seconds)
        except BaseException:
            if self.process is not None and self.process.poll() is None:
                self.kill()
            raise

    def _wait(self, seconds: float) -> RolloutServer:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.request("GET", "/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                time.sleep(0.1)
        raise TimeoutError(self.log.read_text()[-4000:])

    def kill(self) -> None:
        """Send SIGKILL to the server and all its processes."""
        assert self.process is not None
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(timeout=60)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server, the one that was started first."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the CPU time that its processes have used so far."""
        times = [process.cpu_times() for process in self.processes()]
        return sum(used.user + used.system for used in times)

    def request(
        self, method: str, route: str, body: Any = None, key: str | None = KEY, run: RunIdentity | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        headers |= run.headers if run else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


class VllmServe:
    """`vllm serve` in a fork, without this package. A test may kill it and start it again on the same port."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self._model, self._log, self._flags, self.port = model, log, flags, free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        arguments = ["--model", str(self._model), "--dtype", "float32", "--port", str(self.port), "--host", HOST,
                     "--max-model-len", "256", "--enforce-eager", "--kv-cache-memory-bytes", str(2**26),
                     *self._flags]  # fmt: skip
        with self._log.open("a") as log:
            self._process = fork_server("rollout").start("vllm serve", arguments, 0, self._log.parent, log, {})

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise TimeoutError(self._log.read_text()[-4000:])

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
