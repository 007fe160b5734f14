"""Processes of a tiny run on this machine: rollout servers, and a trainer that generates with them."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from tests.paths import IMPORT_PATH, REPOSITORY

EVENT_RECORDER = Path(__file__).with_name("event_recorder.py")
EVENTS_VARIABLE, TRANSFER_VARIABLE = "STRESS_EVENTS", "STRESS_TRANSFER_SECONDS"
OPEN_FILES_VARIABLE = "STRESS_OPEN_FILES"
HOST = "127.0.0.1"
# Part of a server -> text in the process's name or command line.
_PARTS = {"engine": "VLLM::EngineCore", "web server": "-m swift_megatron_grpo.generation.server"}
OFFLINE = {"PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}


def script_parser(description: str | None, name: str, steps: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that the stress scripts share, and --steps if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if steps is not None:
        steps_help = "optimizer steps of each run (default: %(default)s)"
        parser.add_argument("--steps", type=int, default=steps, help=steps_help)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    work_help = f"folder for models, logs and outputs; it is emptied first (default: runs/{name})"
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / name, help=work_help)
    return parser


def make_inputs(work: Path, rows: int) -> tuple[Path, Path, Path]:
    """Empty the work folder, make a tiny model and a dataset in it, and return the paths of all three."""
    work = work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model, dataset = work / "model", work / "data.jsonl"
    for command in (
        ["make_tiny_model.py", "--out", str(model)],
        ["make_dataset.py", "--out", str(dataset), "--rows", str(rows), "--seed", "0"],
    ):
        subprocess.run([sys.executable, str(REPOSITORY / "scripts" / command[0]), *command[1:]], check=True)
    return work, model, dataset


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
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and return before it answers requests."""
        command = [_console_script("swift"), "rollout", "--model", str(self.model), "--model_type", "qwen3",
                   "--template", "qwen3", "--port", str(self.port), "--torch_dtype", "float32",
                   "--vllm_max_model_len", "256", "--vllm_enforce_eager", "true",
                   "--vllm_gpu_memory_utilization", "0.2", *self.flags]  # fmt: skip
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **OFFLINE}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def status(self) -> dict[str, Any] | None:
        """Return the response of /grpo/status, or None if the server does not respond."""
        try:
            with urllib.request.urlopen(f"{self.url}/grpo/status", timeout=5) as response:
                status: dict[str, Any] = json.load(response)
                return status
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def wait(self, seconds: float = 300) -> None:
        """Wait until the server responds; raise if it exits or the time is up."""
        deadline = time.monotonic() + seconds
        while self.status() is None:
            if not self.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"the rollout server at {self.url} did not start; see the end of {self.log}")
            time.sleep(0.5)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the server."""
        if self.process is not None:
            _kill_group(self.process)

    def kill_part(self, part: str) -> None:
        """Send SIGKILL to one process; the others must exit without help. Kill all if no process matches."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if _PARTS[part] in " ".join([process.name(), *process.cmdline()]):
                    process.kill()
                    return
        self.kill()

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server that still run, including orphans."""
        if self.process is None:
            return []
        self.process.poll()
        return [process for process in psutil.process_iter() if _is_in_group(process, self.process.pid)]


@dataclass(frozen=True)
class OutputLine:
    """One line of a trainer's output."""

    at: float  # time.time()
    text: str


@dataclass
class Trainer:
    """One `megatron rlhf --rlhf_type grpo`; its output and its recorded events can be read while it runs."""

    folder: Path
    process: subprocess.Popen[str]
    output: list[OutputLine] = field(default_factory=list)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _characters_read: int = 0  # of the event file, which is ASCII

    @classmethod
    def start(
        cls, folder: Path, model: Path, dataset: Path, servers: Sequence[Server], ranks: int, port: int,
        flags: Sequence[str], environment: dict[str, str],
    ) -> Trainer:  # fmt: skip
        plugins = [str(REPOSITORY / "templates" / "plugins" / "letters.py"), str(EVENT_RECORDER)]
        command = [_console_script("megatron"), "rlhf", "--rlhf_type", "grpo", "--model", str(model),
                   "--model_type", "qwen3", "--template", "qwen3", "--dataset", str(dataset),
                   "--output_dir", str(folder), "--add_version", "false", "--check_model", "false",
                   "--external_plugins", *plugins, "--reward_funcs", "letters",
                   "--vllm_mode", "server", "--vllm_server_base_url", *(server.url for server in servers),
                   "--num_generations", "4", "--micro_batch_size", "2", "--global_batch_size", "8",
                   "--max_length", "128", "--max_completion_length", "24", "--lr", "1e-3", "--beta", "0",
                   "--logging_steps", "1", "--dataloader_num_workers", "0", "--dataset_num_proc", "1",
                   "--load_from_cache_file", "false", "--torch_dtype", "float32", "--fp16", "false",
                   "--recompute_granularity", "none", "--seed_completions", "true",
                   "--no_save_optim", "true", "--no_save_rng", "true", *flags]  # fmt: skip
        variables = {**os.environ, **OFFLINE, "NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(port),
                     EVENTS_VARIABLE: str(_events_file(folder)), **environment}  # fmt: skip
        process = subprocess.Popen(command, env=variables, text=True, start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        trainer = cls(folder, process)
        Thread(target=trainer._read_output, daemon=True).start()
        return trainer

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.folder.with_suffix(".txt").open("w") as file:
            for line in self.process.stdout:
                self.output.append(OutputLine(time.time(), line.rstrip("\n")))
                file.write(line)
                file.flush()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """Return the events recorded so far, without a line that is still being written."""
        path = _events_file(self.folder)
        if path.exists():
            with path.open() as file:
                file.seek(self._characters_read)
                text = file.read()
            complete = text[: text.rfind("\n") + 1]
            self._characters_read += len(complete)
            self._events += map(json.loads, complete.splitlines())
        return self._events

    def logged_steps(self) -> list[dict[str, Any]]:
        """Return the training steps of logging.jsonl."""
        lines = (self.folder / "logging.jsonl").read_text().splitlines()
        return [step for step in map(json.loads, lines) if "loss" in step]

    def check_exit(self, problem: str = "") -> None:
        """Wait for the process; raise, with the end of its output, if it failed or there is another problem."""
        code = self.process.wait()
        if code != 0 or problem:
            end = "\n".join(line.text for line in self.output[-40:])
            raise RuntimeError(f"{problem or 'the run failed'}, exit code {code}; the end of its output:\n{end}")

    def kill(self) -> None:
        if self.is_running:
            _kill_group(self.process)


def _console_script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _events_file(folder: Path) -> Path:
    return folder.with_suffix(".events.jsonl")


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL to a process that leads a group, and to the rest of the group, even if the leader has exited."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def rank_file(events: str | Path, rank: int) -> Path:
    """Return the file with the process id of a rank whose events go to `events`."""
    return Path(events).with_suffix(f".rank-{rank}")


def digest(tokens: Sequence[int]) -> str:
    """Return a short hash that identifies a completion, both in what was trained and in the rollout dump."""
    return blake2b(json.dumps(list(tokens)).encode(), digest_size=12).hexdigest()


def free_ports(number: int, first: int = 26000, last: int = 28000) -> list[int]:
    """Return free ports below the ephemeral range, so that a restarted server finds its port free."""
    ports: list[int] = []
    while len(ports) < number:
        port = random.randrange(first, last)
        with suppress(OSError):
            socket.create_server((HOST, port)).close()
            ports = [*ports, port] if port not in ports else ports
    return ports
