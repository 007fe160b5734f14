"""An error of one rank in a step that all ranks perform together is an error of all, over gloo."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.parallel import Coordinator


def fails() -> Any:
    raise LookupError("no tool")


def fails_everywhere() -> Any:
    raise SharedFailure("the disk is full")


def outcomes(folder: Path, *work: Callable[[], Any]) -> list[str]:
    """Return what each of two ranks gets for its work, or its error."""

    def run(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), len(work))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(work))
        coordinator = Coordinator(timedelta(seconds=20))
        try:
            outcome = repr(coordinator.all_gather_or_raise(work[rank], "generating"))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        (folder / f"{rank}.txt").write_text(outcome)

    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [(folder / f"{rank}.txt").read_text() for rank in range(len(work))]


@pytest.mark.parametrize(
    ("work", "first", "second"),
    [
        (lambda: {2: "b"}, "[{1: 'a'}, {2: 'b'}]", "[{1: 'a'}, {2: 'b'}]"),
        (fails, "RankFailure: generating failed on rank 1: LookupError: no tool", "LookupError: no tool"),
        (fails_everywhere, "SharedFailure: the disk is full", "SharedFailure: the disk is full"),
        (
            threading.Lock,
            "RankFailure: generating failed on rank 1: TypeError: cannot pickle '_thread.lock' object",
            "TypeError: cannot pickle '_thread.lock' object",
        ),
    ],
)
def test_every_rank_gets_all_values_or_the_error(
    tmp_path: Path, work: Callable[[], Any], first: str, second: str
) -> None:
    assert outcomes(tmp_path, lambda: {1: "a"}, work) == [first, second]
