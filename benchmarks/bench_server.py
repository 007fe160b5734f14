"""Compare generation behind a rollout server with generation in the training process, on one GPU or on a CPU.

    python -m benchmarks.bench_server --json FILE --shape 1.7b --work FOLDER     on a machine with one GPU
    python -m benchmarks.bench_server --json FILE --dry                          on a CPU, a few seconds of a tiny model

Both engines are on the same device and generate in turns: as many completions, prompts and tokens, none of them cached.
The server has the checkpoint's weights, so nothing is sent before. `ratio` in the file is the median time behind the
server over the median time in the process; `cpu_seconds` are those of each process in a round. On a CPU only the
latter are useful, from one revision to another: the model takes most of the time, and the training process has the
stand-ins for CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.free_gpus import wait_until_free
from benchmarks.harness.generation_arms import WEIGHTS_VERSION, GenerationJob, prompts_of, sampling_of
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import devices_locked, exit_at_sigterm, visible_devices
from benchmarks.harness.shapes import SHAPES

ARMS = "benchmarks.harness.generation_arms"
START_SECONDS = 600.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=absolute, required=True, help="file for the results")
    dense = [name for name, shape in SHAPES.items() if shape.model_type == "qwen3"]
    add("--shape", choices=dense, default="1.7b", help="sizes of the model")
    add("--dry", action="store_true", help="the shape toy with 2 prompts of 4 completions of 32 tokens, 1 round")
    add("--prompts", type=int, default=16, help="prompts of a round")
    add("--group-size", type=int, default=8, help="completions of a prompt")
    add("--tokens", type=int, default=512, help="tokens of a completion")
    add("--prompt-tokens", type=int, default=128, help="tokens of a prompt, without the template's")
    add("--rounds", type=int, default=5, help="measured rounds of each arm, after one to warm up")
    add("--memory", type=float, default=0.35, help="share of the GPU's memory for each of the two engines")
    add("--profile", action="store_true", help="also record kernels and host functions of short rounds in the process")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--work", type=absolute, default=REPOSITORY / "runs" / "server", help="folder for model and logs")
    return parser.parse_args()


def job_of(args: argparse.Namespace) -> GenerationJob:
    gpu = torch.cuda.is_available()
    return GenerationJob(
        prompts=args.prompts, group_size=args.group_size, prompt_characters=args.prompt_tokens, tokens=args.tokens,
        max_model_len=args.prompt_tokens + args.tokens + 64, max_num_seqs=256, memory_share=args.memory,
        dtype="bfloat16" if gpu else "float32", eager=args.eager or not gpu,
    )  # fmt: skip


def free_port() -> int:
    """Return a port below those that the system hands out, which vLLM may take before the server listens."""
    while True:
        port = random.randint(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


@contextmanager
def running(arguments: Sequence[str], log: Path, pipes: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments, and end it with all processes that it has started."""
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_PORT": str(free_port())}
    environment |= {"HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, cwd=log.parent, text=True, stderr=errors,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL, stdout=subprocess.PIPE if pipes else errors,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        end_session(process.pid)
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with suppress(OSError):  # what its buffer holds for a process that has ended
                pipe.close()


def end_session(leader: int) -> None:
    """Kill the processes of a session, and all that these have started, also if the leader has ended."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                members += [process, *process.children(recursive=True)]
    for process in members:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([process for process in members if process.pid != leader], timeout=30)


class InProcess:
    """The engine of a trainer, in a process that does nothing else."""

    name = "in_process"

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        self._read("READY")

    @classmethod
    @contextmanager
    def started(cls, model: Path, job: GenerationJob, log: Path) -> Iterator[InProcess]:
        with running(["-m", ARMS, "in_process", str(model), json.dumps(asdict(job))], log, pipes=True) as process:
            yield cls(process, log)

    def _read(self, mark: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise SystemExit(f"bench: the engine in process has ended; the log is {self._log}")

    def generate(self, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        round_: dict[str, Any] = json.loads(self._read("ROUND "))
        return {**round_, "cpu_seconds": {"trainer": round_["cpu_seconds"]}}

    def profile(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("profile\n")
        self.process.stdin.flush()
        profile: dict[str, Any] = json.loads(self._read("PROFILE "))
        return profile


class BehindServer:
    """The server, and this process as its client, with the code of a trainer's rank 0."""

    name = "server"

    def __init__(self, process: subprocess.Popen[str], engine: Any, job: GenerationJob) -> None:
        self.process, self._engine, self._job = process, engine, job

    @classmethod
    @contextmanager
    def started(cls, model: Path, job: GenerationJob, log: Path) -> Iterator[BehindServer]:
        from swift_megatron_grpo.generation.remote.engine import RemoteVllm
        from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
        from swift_megatron_grpo.settings.config import ServerConfig

        port = free_port()
        flags = ["--model", str(model), "--model_type", "qwen3", "--template", "qwen3", "--port", str(port),
                 "--torch_dtype", job.dtype, "--vllm_gpu_memory_utilization", str(job.memory_share),
                 "--vllm_max_model_len", str(job.max_model_len), "--vllm_max_num_seqs", str(job.max_num_seqs),
                 "--vllm_enforce_eager", str(job.eager).lower(), "--vllm_enable_prefix_caching", "true",
                 "--log_level", "warning"]  # fmt: skip
        config = ServerConfig(
            urls=(f"http://127.0.0.1:{port}",), group_ports=(0,), timeout=START_SECONDS, request_timeout=600.0,
            api_key=None, bucket_bytes=2**28, needed_length=job.max_model_len, model={},
        )  # fmt: skip
        with running(["-m", ARMS, "server", *flags], log) as process, ExitStack() as client:
            wait_until_up(process, port, log)
            engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**28), rank=0)
            client.callback(engine.shutdown)
            engine.check()
            for server in engine._servers.all:
                server.weights_version = WEIGHTS_VERSION
            engine._version = WEIGHTS_VERSION
            engine.mark_verified()
            yield cls(process, engine, job)

    def generate(self, number: int) -> dict[str, Any]:
        from swift_megatron_grpo.generation.interface import requests_for

        requests = requests_for(prompts_of(self._job, number), self._job.group_size, None, WEIGHTS_VERSION)
        before = self.cpu_seconds()
        began = time.perf_counter()
        generation = self._engine.generate(requests, self._job.group_size, sampling_of(self._job))
        tokens = missing = 0
        missing = len(requests)
        while missing:
            finished = generation.next(WEIGHTS_VERSION).finished
            missing -= len(finished)
            tokens += sum(len(rollout.completion_ids) for rollout in finished.values())
        seconds = time.perf_counter() - began
        used = {name: value - before.get(name, 0.0) for name, value in self.cpu_seconds().items()}
        return {"seconds": seconds, "tokens": tokens, "cpu_seconds": {k: v for k, v in used.items() if v > 0.005}}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of this process and of each of the server's."""
        root = psutil.Process(self.process.pid)
        names = {os.getpid(): "client", root.pid: "web server"}
        used = {}
        for process in (psutil.Process(), root, *root.children(recursive=True)):
            times = process.cpu_times()
            used[names.get(process.pid, f"{process.name()} {process.pid}")] = times.user + times.system
        return used


def wait_until_up(process: subprocess.Popen[str], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"bench: the server has not started; the log is {log}")


def measure(arms: list[Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rounds of each arm; the arms take turns, and the first round of each is not kept."""
    measured: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for number in range(rounds + 1):
        for arm in arms:
            result = arm.generate(number)
            print(arm.name, json.dumps(result), flush=True)
            if number:
                measured[arm.name].append(result)
    return measured


def compared(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the median time of each arm, and that behind the server over that in the process."""
    times = {name: median(one["seconds"] for one in rounds) for name, rounds in measured.items()}
    return {"seconds": times, "ratio": times[BehindServer.name] / times[InProcess.name]}


def main() -> int:
    args = parse()
    exit_at_sigterm()
    if args.dry:
        args.shape, args.prompts, args.group_size, args.tokens, args.rounds = "toy", 2, 4, 32, 1
    args.work.mkdir(parents=True, exist_ok=True)
    job, model = job_of(args), made_checkpoint(args.work, args.shape)
    with devices_locked(), ExitStack() as stack:
        if torch.cuda.is_available():
            wait_until_free(visible_devices()[:1])
        in_process = stack.enter_context(InProcess.started(model, job, args.work / "in_process.log"))
        server = stack.enter_context(BehindServer.started(model, job, args.work / "server.log"))
        measured = measure([in_process, server], args.rounds)
        profile = {"profile": in_process.profile()} if args.profile else {}
    device, versions = machine(revision(), PACKAGES)
    report = {"device": device, "versions": versions, "shape": args.shape, "job": asdict(job),
              **compared(measured), "rounds": measured, **profile}  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("seconds", "ratio")}))
    equal = len({one["tokens"] for rounds in measured.values() for one in rounds}) == 1
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
