"""The helper processes of checkpoint writing end with their rank; upstream's do not."""

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
from swift_megatron_grpo.training.upstream_fixes.result_queue import end_writers_with_rank
if {fixed}:
    end_writers_with_rank()
if hasattr(filesystem_async, "get_write_results_queue"):  # its name from megatron-core 0.17 on
    queue = filesystem_async.get_write_results_queue()
else:
    queue = filesystem_async._get_write_results_queue()
queue.put("written")
assert queue.get() == "written"
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


# The file is a pipe without a reader, so the writer waits when the rank is killed, in the middle of a checkpoint.
RANK_WITH_WRITER = """
import os, queue, signal, threading, time
import psutil
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from swift_megatron_grpo.training.upstream_fixes.result_queue import end_writers_with_rank
if {fixed}:
    end_writers_with_rank()
os.mkfifo("pipe")

def end():
    before = {{child.pid for child in psutil.Process().children()}}
    while not (writers := {{child.pid for child in psutil.Process().children()}} - before):
        time.sleep(0.05)
    time.sleep(2)
    print(*writers, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if not hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc"):
    print("threads", flush=True)
    raise SystemExit
threading.Thread(target=end).start()
time.sleep(1)
FileSystemWriterAsync.write_preloaded_data_multiproc([], False, 0, [("pipe", "key", ([], []))], queue.Queue())
"""


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("code", [RANK, RANK_WITH_WRITER], ids=["manager", "writer"])
def test_the_helper_ends_within_two_seconds_after_its_rank_was_killed(tmp_path: Path, code: str, fixed: bool) -> None:
    with (tmp_path / "output").open("w") as output:
        rank = fork_server("trainer").start("code", [code.format(fixed=fixed)], 0, tmp_path, output, {})
    wait_for_end(psutil.Process(rank.pid), 240)  # not its status: a writer that is left holds that pipe open
    if (tmp_path / "output").read_text() == "threads\n":
        pytest.skip("this version of megatron-core writes in threads of the rank")
    pids = [int(pid) for pid in (tmp_path / "output").read_text().split()]
    helpers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    for helper in helpers:
        wait_for_end(helper, 2)
    alive = [helper for helper in helpers if is_alive(helper)]
    for helper in alive:
        helper.kill()
    assert pids and bool(alive) != fixed


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for_end(process: psutil.Process, seconds: float) -> None:
    end = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < end:
        time.sleep(0.05)
