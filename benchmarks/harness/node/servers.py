"""Start the rollout servers of a case, and end its benchmark if one of them ends."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness.node.cases import Case, light_engine, toy
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.processes import kill
from benchmarks.harness.shapes import SHAPES

_MAX_MODEL_LEN = "1024"
_PORTS_APART = 50  # of servers; an engine takes the next ones


@contextmanager
def running(case: Case, model: Path, folder: Path, dry: bool) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """Start the servers of a case; yield URL and process of each, and end them."""
    if case.servers is None:
        yield []
        return
    folder.mkdir(parents=True, exist_ok=True)
    port = 8100 + random.randrange(100) * 100
    with ExitStack() as ends:
        started = []
        for place, gpu in enumerate(case.servers.gpus):
            with (folder / f"server-{place}.log").open("wb") as log:
                process = subprocess.Popen(
                    command(case, model, port, dry), env=_environment("" if dry else str(gpu)), stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            ends.callback(kill, process)
            started.append((f"http://127.0.0.1:{port}", process))
            port += _PORTS_APART
        yield started


def command(case: Case, model: Path, port: int, dry: bool) -> list[str]:
    assert case.servers is not None
    shape = SHAPES[toy(case.shape) if dry else case.shape]
    light = [*light_engine(case.kind)] if dry else []
    return [sys.executable, "-P", "-m", "swift.cli.rollout", "--host", "127.0.0.1", "--port", str(port), "--model",
            str(model), "--model_type", shape.model_type, "--template", shape.template, "--torch_dtype",
            "float32" if dry else "bfloat16", "--vllm_max_model_len", _MAX_MODEL_LEN, *case.servers.flags,
            *without_sleep(light)]  # fmt: skip


def without_sleep(flags: Sequence[str]) -> list[str]:
    """Return flags that a server has as well: it never sleeps."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [word for pair in pairs if pair[0] != "--sleep_level" for word in pair]


def _environment(gpu: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "SWIFT_MEGATRON_GRPO": "on", "CUDA_VISIBLE_DEVICES": gpu}


def finish(command: Sequence[str], servers: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> int:
    """Run a benchmark and return its exit code. It is ended if a server has ended, which it would wait for."""
    benchmark = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        while (code := benchmark.poll()) is None:
            for url, server in servers:
                if server.poll() is not None:
                    print(f"eight: the server at {url} has ended with exit code {server.returncode}", file=sys.stderr)
                    return 1
            time.sleep(0.5)
        return code
    finally:
        kill(benchmark)
