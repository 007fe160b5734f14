"""A second signal ends a rank at once, unless it is the kernel's, after the launcher has died."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import pytest

from tests.forking.client import start_piped

LAUNCHER_AND_RANK = """
import os, time
if rank := os.fork():
    os.write(1, f"{rank}\\n".encode())  # at once: the rank prints as well
    time.sleep(600)
from datetime import timedelta
import torch.distributed as dist
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.stopping.request import StopRequest

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
request = StopRequest(Coordinator(timedelta(seconds=60)), grace=120)
request.listen(lambda seconds: None, lambda: None)
print("ready", flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("launcher_dies", [False, True])
def test_a_second_signal_ends_a_rank_at_once_unless_its_launcher_just_died(launcher_dies: bool) -> None:
    launcher, output = start_piped("upstream", "code", LAUNCHER_AND_RANK)
    lines = iter(output.readline, "")
    rank = int(next(lines))
    try:
        assert any(line == "ready\n" for line in lines)
        if launcher_dies:
            os.kill(launcher.pid, signal.SIGKILL)
            while is_running(launcher.pid):
                time.sleep(0.01)
        os.kill(rank, signal.SIGTERM)
        assert any("received SIGTERM: the run stops after the current step" in line for line in lines)
        time.sleep(1.5)
        os.kill(rank, signal.SIGTERM)
        if not launcher_dies:
            assert any("received a second signal, SIGTERM, and ends at once" in line for line in lines)
        end = time.monotonic() + (2 if launcher_dies else 30)
        while is_running(rank) and time.monotonic() < end:
            time.sleep(0.05)
        assert is_running(rank) == launcher_dies
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(launcher.pid, signal.SIGKILL)
        output.close()
