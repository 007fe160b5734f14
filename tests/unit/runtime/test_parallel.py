"""An error of one rank in a step that all ranks perform together is an error of all, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking.client import run_code

# In processes of their own: a fork of a pytest worker that has used gloo shares gloo's epoll, and crashes the worker.
PROGRAM = """
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
import torch.distributed as dist
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.parallel import Coordinator

def returns() -> Any:
    return {2: "b"}

def fails() -> Any:
    raise LookupError("no tool")

def fails_everywhere() -> Any:
    raise SharedFailure("the disk is full")

dist.init_process_group("gloo")
rank = dist.get_rank()
second = {work.__name__: work for work in (returns, fails, fails_everywhere, threading.Lock)}[sys.argv[1]]
try:
    work = second if rank == 1 else lambda: {1: "a"}
    outcome = repr(Coordinator(timedelta(seconds=20)).all_gather_or_raise(work, "generating"))
except Exception as error:
    outcome = f"{type(error).__name__}: {error}"
Path(sys.argv[2], f"{rank}.txt").write_text(outcome)
"""


@pytest.mark.parametrize(
    ("work", "first", "second"),
    [
        ("returns", "[{1: 'a'}, {2: 'b'}]", "[{1: 'a'}, {2: 'b'}]"),
        ("fails", "RankFailure: generating failed on rank 1: LookupError: no tool", "LookupError: no tool"),
        ("fails_everywhere", "SharedFailure: the disk is full", "SharedFailure: the disk is full"),
        (
            "allocate_lock",
            "RankFailure: generating failed on rank 1: TypeError: cannot pickle '_thread.lock' object",
            "TypeError: cannot pickle '_thread.lock' object",
        ),
    ],
)
def test_every_rank_gets_all_values_or_the_error(tmp_path: Path, work: str, first: str, second: str) -> None:
    run_code("upstream", PROGRAM, work, str(tmp_path), ranks=2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [first, second]
