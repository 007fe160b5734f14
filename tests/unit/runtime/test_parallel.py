"""Ranks exchange values over gloo without padding all to the largest, and an error of one rank is an error of all."""

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


GATHER = """
import resource
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from swift_megatron_grpo.runtime.parallel import Coordinator

dist.init_process_group("gloo")
rank, coordinator = dist.get_rank(), Coordinator(timedelta(seconds=60))
even, uneven = (300_000, 300_001, 300_002, 1), (1, 400_000, 0, 200_000)
for lengths in ((0, 1, 2, 3), even, uneven, (8_000_000, 6_000_000, 4_000_000, 2_000_000)):
    expected = [bytes([place]) * length for place, length in enumerate(lengths)]
    assert coordinator.all_gather(expected[rank]) == expected, lengths
large = 2**25
value = bytes(large) if rank == 0 else b""
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gathered = coordinator.all_gather(value)
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert [len(part) for part in gathered] == [large, 0, 0, 0]
Path(sys.argv[1], f"{rank}.txt").write_text(str(used / large))
"""


ANY_NUMBER = """
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from swift_megatron_grpo.runtime.parallel import Coordinator

dist.init_process_group("gloo")
rank, size, coordinator = dist.get_rank(), dist.get_world_size(), Coordinator(timedelta(seconds=60))
for round in range(20):
    values = [(other, "x" * (other * round)) for other in range(size)]
    assert coordinator.all_gather(values[rank]) == values
    largest = round % size  # on this rank
    assert coordinator.max(-1000 - round if rank != largest else 7 - round) == 7 - round
Path(sys.argv[1], f"{rank}.txt").write_text("equal")
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13])
def test_any_number_of_ranks_gathers_and_finds_the_largest(tmp_path: Path, ranks: int) -> None:
    run_code("upstream", ANY_NUMBER, str(tmp_path), ranks=ranks)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(ranks)] == ["equal"] * ranks


def test_what_one_rank_has_alone_is_not_padded_for_each_rank(tmp_path: Path) -> None:
    """A rank needs its bytes and the unpickled value, 2 times the size; padding took 7 times, with 4 ranks."""
    run_code("upstream", GATHER, str(tmp_path), ranks=4)
    used = [float((tmp_path / f"{rank}.txt").read_text()) for rank in range(4)]
    assert max(used[1:]) < 3, used
