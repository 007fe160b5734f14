"""Train a rehearsal: its rollout server, if it has one, and its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swift.utils import find_free_port

from swift_megatron_grpo.cli.check_script.rehearsal import Rehearsal
from swift_megatron_grpo.cli.check_script.stand_ins import Flags, typed
from swift_megatron_grpo.cli.command_line import Refused

_SECONDS_TO_START = 300


def train(rehearsal: Rehearsal, folder: Path) -> None:
    """Run the rehearsal and print the losses of its steps. Raises Refused if it fails."""
    environment = {**os.environ, "NPROC_PER_NODE": str(rehearsal.ranks), "MASTER_PORT": str(find_free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NNODES", "NODE_RANK"):
        environment.pop(name, None)  # the check of the flags has set some
    with ExitStack() as stack:
        address: Flags = {}
        if rehearsal.server is not None:
            address = stack.enter_context(_running_server(rehearsal.server, folder, environment))
        command = [sys.executable, "-P", "-m", "swift.cli._megatron.main", "rlhf", *typed(rehearsal.reduced | address)]
        code = subprocess.run(command, env=environment, cwd=folder).returncode
    log = folder / "output" / "logging.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    for step in steps:
        if "loss" in step:
            print(f"check-script: loss {step['loss']:.6f}, grad_norm {step['grad_norm']:.6f}, reward {step['reward']}")
    if code:
        raise Refused(f"the run ended with exit code {code}")


@contextmanager
def _running_server(flags: Flags, folder: Path, environment: Mapping[str, str]) -> Iterator[Flags]:
    """Start the rollout server of a script and yield the trainer's flags with its address."""
    port = find_free_port()
    command = [sys.executable, "-m", "swift_megatron_grpo.generation.server", *typed(flags | {"port": [str(port)]})]
    with (folder / "rollout.log").open("w") as log:
        server = subprocess.Popen(command, env=dict(environment), cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                                  start_new_session=True)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, server, folder / "rollout.log")
        yield {"vllm_server_base_url": [url]}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health/", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise Refused(f"the rollout server did not start:\n{log.read_text()[-4000:]}")
