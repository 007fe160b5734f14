"""A small typed view of Megatron's process groups, and the exchange of Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import mpu

from swift_megatron_grpo.runtime.failures import RankFailure, SharedFailure

T = TypeVar("T")
_BROADCAST_BYTES = 2**16  # of a gather that take as long as one more collective operation


@dataclass(frozen=True)
class RankPosition:
    """The sizes of the layout and this rank's position in it."""

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    tp_group: dist.ProcessGroup
    pp_size: int
    cp_size: int
    cp_rank: int
    cp_group: dist.ProcessGroup
    dp_size: int
    dp_rank: int
    dp_cp_group: dist.ProcessGroup

    @classmethod
    def from_megatron(cls) -> RankPosition:
        """Read the position from Megatron's process groups."""
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            tp_group=mpu.get_tensor_model_parallel_group(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            cp_group=mpu.get_context_parallel_group(),
            dp_size=mpu.get_data_parallel_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )


class Coordinator:
    """Exchange Python objects between ranks over gloo, so that a slow rollout cannot trip NCCL's watchdog."""

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. No rank allocates much more than these values take."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        lengths = [int(size) for size in sizes]
        alone = large_parts(lengths)
        width = max((lengths[rank] for rank in {*range(self.world_size)} - {*alone}), default=0)
        parts = [torch.empty(width, dtype=torch.uint8) for _ in lengths]
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(mine)] = mine if self.rank not in alone else 0
        dist.all_gather(parts, padded, group=self._group)  # of nothing, if all are large
        for rank in alone:
            parts[rank] = mine if rank == self.rank else torch.empty(lengths[rank], dtype=torch.uint8)
            dist.broadcast(parts[rank], src=rank, group=self._group)
        return [pickle.loads(part.numpy().data[:length]) for part, length in zip(parts, lengths, strict=True)]

    def exchange(self, outgoing: Mapping[int, T], senders: Sequence[int]) -> dict[int, T]:
        """Send values to the ranks that they are for; return those of the given senders, by sender."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in senders}
        data = {
            rank: torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            for rank, value in outgoing.items()
        }
        announced = [dist.irecv(size, rank, self._group) for rank, size in sizes.items()]
        sent = [dist.isend(torch.tensor([len(part)]), rank, self._group) for rank, part in data.items()]
        _wait_for(announced)
        received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        arriving = [dist.irecv(part, rank, self._group) for rank, part in received.items()]
        sent += [dist.isend(part, rank, self._group) for rank, part in data.items()]
        _wait_for(arriving + sent)
        return {rank: pickle.loads(part.numpy().data) for rank, part in received.items()}

    def max(self, value: int) -> int:
        """Return the largest value of all ranks. Cheaper than `all_gather`: one reduction of one number."""
        largest = torch.tensor([value])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return int(largest.item())

    def gather_samples(self, values: dict[int, T], position: RankPosition) -> dict[int, T]:
        """Gather values by sample on all ranks. Among ranks that hold copies, only the first one sends."""
        local = values if position.tp_rank == 0 and position.cp_rank == 0 else {}
        return {index: value for part in self.all_gather(local) for index, value in part.items()}

    def all_gather_or_raise(self, work: Callable[[], T], task: str) -> list[T]:
        """Run `work` on every rank and exchange the results; if `task` failed on any rank, raise on all of them."""
        content, error = b"", None
        try:
            content = pickle.dumps(work())  # here, because no rank may fail in the exchange
        except Exception as caught:
            error = caught
        message = None if error is None else f"{type(error).__name__}: {error}"
        shared = str(error) if isinstance(error, SharedFailure) else None
        gathered = self.all_gather((content, message, shared))
        if error is not None:
            raise error
        for _, _, failure in gathered:
            if failure is not None:
                raise SharedFailure(failure)
        failures = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(gathered) if text is not None]
        if failures:
            raise RankFailure(f"{task} failed on " + "; ".join(failures))
        return [pickle.loads(content) for content, _, _ in gathered]


def large_parts(lengths: Sequence[int]) -> list[int]:
    """Return the ranks whose parts are broadcast one by one, in order; the others are padded to the same length.

    Where one rank has all, as rank 0 has what servers generate, padding would take as many times the bytes as there are
    ranks.
    """
    ranks = sorted(range(len(lengths)), key=lambda rank: -lengths[rank])
    one_by_one = accumulate((lengths[rank] + _BROADCAST_BYTES for rank in ranks), initial=0)
    padded = [len(lengths) * length for length in (*(lengths[rank] for rank in ranks), 0)]
    costs = [alone + rest for alone, rest in zip(one_by_one, padded, strict=True)]
    return sorted(ranks[: costs.index(min(costs))])


def _wait_for(messages: Sequence[dist.Work | None]) -> None:
    for message in messages:
        assert message is not None  # None: this rank is not of the group
        message.wait()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Take the maximum over all ranks, in place."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
