"""The processes of a run with servers, tiny, on this machine: rollout servers and a trainer that speaks to them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from tests.paths import REPOSITORY

WITNESS = Path(__file__).with_name("witness.py")
HOST = "127.0.0.1"
_PARTS = {"engine": "VLLM::EngineCore", "web server": "-m swift_megatron_grpo.server"}  # by name or command line
OFFLINE = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def make_inputs(folder: Path, rows: int) -> tuple[Path, Path]:
    """A tiny model and a dataset."""
    model, dataset = folder / "model", folder / "data.jsonl"
    for command in (
        ["make_tiny_model.py", "--out", str(model)],
        ["make_dataset.py", "--out", str(dataset), "--rows", str(rows), "--seed", "0"],
    ):
        subprocess.run([sys.executable, str(REPOSITORY / "scripts" / command[0]), *command[1:]], check=True)
    return model, dataset


@dataclass
class Server:
    """One `swift rollout`, which may be started more than once."""

    model: Path
    port: int
    log: Path
    flags: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Returns before it answers."""
        command = [script("swift"), "rollout", "--model", str(self.model), "--model_type", "qwen3", "--template",
                   "qwen3", "--port", str(self.port), "--torch_dtype", "float32", "--vllm_max_model_len", "256",
                   "--vllm_enforce_eager", "true", "--vllm_gpu_memory_utilization", "0.2", *self.flags]  # fmt: skip
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **OFFLINE}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def status(self) -> dict[str, Any] | None:
        """None: it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/grpo/status", timeout=5) as response:
                said: dict[str, Any] = json.load(response)
                return said
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def wait(self, seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while self.status() is None:
            if not self.runs or time.monotonic() > until:
                raise RuntimeError(f"the rollout server at {self.url} did not start; the end of {self.log} says why")
            time.sleep(0.5)

    def kill(self) -> None:
        """kill -9, of all its processes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def kill_part(self, part: str) -> None:
        """kill -9 of one process, where it has one that fits; the others have to end by themselves."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if _PARTS[part] in " ".join([process.name(), *process.cmdline()]):
                    process.kill()
                    return
        self.kill()

    def processes(self) -> list[psutil.Process]:
        """All that are left of it, also those that nobody waits for."""
        if self.process is None:
            return []
        self.process.poll()
        return [process for process in psutil.process_iter() if _is_of_group(process, self.process.pid)]


@dataclass(frozen=True)
class Said:
    """A line of a trainer's output."""

    at: float  # time.time()
    text: str


@dataclass
class Trainer:
    """One `megatron rlhf --rlhf_type grpo`. Its output, and what its witness notes, are here as they come."""

    folder: Path
    process: subprocess.Popen[str]
    said: list[Said] = field(default_factory=list)
    _noted: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0  # characters of the witness's file, which are ASCII

    @classmethod
    def start(
        cls, folder: Path, model: Path, dataset: Path, servers: Sequence[Server], ranks: int, port: int,
        flags: Sequence[str], environment: dict[str, str], hear: Callable[[str], object] = len,
    ) -> Trainer:  # fmt: skip
        plugins = [str(REPOSITORY / "templates" / "plugins" / "letters.py"), str(WITNESS)]
        command = [script("megatron"), "rlhf", "--rlhf_type", "grpo", "--model", str(model), "--model_type", "qwen3",
                   "--template", "qwen3", "--dataset", str(dataset), "--output_dir", str(folder),
                   "--add_version", "false", "--check_model", "false", "--external_plugins", *plugins,
                   "--reward_funcs", "letters", "--vllm_mode", "server",
                   "--vllm_server_base_url", *(server.url for server in servers),
                   "--num_generations", "4", "--micro_batch_size", "2", "--global_batch_size", "8",
                   "--max_length", "128", "--max_completion_length", "24", "--lr", "1e-3", "--beta", "0",
                   "--logging_steps", "1", "--dataloader_num_workers", "0", "--dataset_num_proc", "1",
                   "--load_from_cache_file", "false", "--torch_dtype", "float32", "--fp16", "false",
                   "--recompute_granularity", "none", "--seed_completions", "true",
                   "--no_save_optim", "true", "--no_save_rng", "true", *flags]  # fmt: skip
        variables = {**os.environ, **OFFLINE, "NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(port),
                     "WITNESS": str(folder.with_suffix(".witness.jsonl")), **environment}  # fmt: skip
        process = subprocess.Popen(command, env=variables, text=True, start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        trainer = cls(folder, process)
        Thread(target=trainer._listen, args=(hear,), daemon=True).start()
        return trainer

    def _listen(self, hear: Callable[[str], object]) -> None:
        assert self.process.stdout is not None
        with self.folder.with_suffix(".txt").open("w") as file:
            for line in self.process.stdout:
                self.said.append(Said(time.time(), line.rstrip("\n")))
                file.write(line)
                file.flush()
                hear(line)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def noted(self) -> list[dict[str, Any]]:
        """By the witness, so far. A line that is being written is left for later."""
        path = self.folder.with_suffix(".witness.jsonl")
        if path.exists():
            with path.open() as file:
                file.seek(self._read)
                text = file.read()
            complete = text[: text.rfind("\n") + 1]
            self._read += len(complete)
            self._noted += map(json.loads, complete.splitlines())
        return self._noted

    def steps(self) -> list[dict[str, Any]]:
        """As logged."""
        lines = (self.folder / "logging.jsonl").read_text().splitlines()
        return [step for step in map(json.loads, lines) if "loss" in step]

    def end(self) -> None:
        if self.runs:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _is_of_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def digest(tokens: Sequence[int]) -> str:
    """By which a completion is known, in what was trained and in what was dumped."""
    return blake2b(json.dumps(list(tokens)).encode(), digest_size=12).hexdigest()


def free_ports(number: int, first: int = 26000, last: int = 28000) -> list[int]:
    """Below those that the system gives to connections, so that a server which is started again finds its own free."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(first, last)
        with suppress(OSError):
            socket.create_server((HOST, port)).close()
            found = [*found, port] if port not in found else found
    return found
