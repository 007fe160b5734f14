"""The helper process of checkpoint writing ends with its rank; upstream's does not."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.forking.client import fork_server

RANK = """
import os, signal
import psutil
from megatron.core.dist_checkpointing.strategies import filesystem_async
from swift_megatron_grpo.training.megatron_fixes.result_queue import end_result_queue_with_rank
if {fixed}:
    end_result_queue_with_rank()
if hasattr(filesystem_async, "get_write_results_queue"):  # its name from megatron-core 0.17 on
    queue = filesystem_async.get_write_results_queue()
else:
    queue = filesystem_async._get_write_results_queue()
queue.put("written")
assert queue.get() == "written"
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("fixed", [True, False])
def test_the_helper_ends_within_two_seconds_after_its_rank_was_killed(tmp_path: Path, fixed: bool) -> None:
    with (tmp_path / "output").open("w") as output:
        rank = fork_server("trainer").start("code", [RANK.format(fixed=fixed)], 0, tmp_path, output, {})
    rank.wait(timeout=60)
    pids = [int(pid) for pid in (tmp_path / "output").read_text().split()]
    helpers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    end = time.monotonic() + 2
    while any(map(is_alive, helpers)) and time.monotonic() < end:
        time.sleep(0.05)
    alive = [helper for helper in helpers if is_alive(helper)]
    for helper in alive:
        helper.kill()
    assert pids and bool(alive) != fixed


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
