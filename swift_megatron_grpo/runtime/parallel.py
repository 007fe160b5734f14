"""A small typed view of Megatron's process groups, and the exchange of Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import mpu

from swift_megatron_grpo.runtime.failures import RankFailure, SharedFailure

T = TypeVar("T")


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
        """Return the values of all ranks, in rank order.

        In each round a rank has twice as many: 4,096 ranks need 12 rounds. The rings of gloo need 4,095, one after the
        other, and parts of equal length.
        """
        held: list[bytes | memoryview] = [pickle.dumps(value)]  # of this rank and of those behind it
        while (distance := len(held)) < self.world_size:
            held += self._pass_on(distance, held[: self.world_size - distance])
        in_order = [held[(rank - self.rank) % self.world_size] for rank in range(self.world_size)]
        return [pickle.loads(part) for part in in_order]

    def _pass_on(self, distance: int, parts: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Send parts to the rank this far before this one, and return as many of the one this far behind it."""
        receiver, sender = self._neighbours(distance)
        lengths = torch.tensor([len(part) for part in parts])
        arriving = torch.empty_like(lengths)
        sent = [dist.isend(lengths, receiver, self._group)]
        sent.append(dist.isend(_as_tensor(bytearray().join(parts)), receiver, self._group))
        _wait_for([dist.irecv(arriving, sender, self._group)])
        received = torch.empty(int(arriving.sum()), dtype=torch.uint8)
        _wait_for([dist.irecv(received, sender, self._group), *sent])
        edges = accumulate(arriving.tolist(), initial=0)
        return [received.numpy().data[begin:end] for begin, end in pairwise(edges)]

    def _neighbours(self, distance: int) -> tuple[int, int]:
        """Return the ranks this far before and behind this one; the first is behind the last."""
        return (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size

    def exchange(self, outgoing: Mapping[int, T], senders: Sequence[int]) -> dict[int, T]:
        """Send values to the ranks that they are for; return those of the given senders, by sender."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in senders}
        data = {rank: _as_tensor(bytearray(pickle.dumps(value))) for rank, value in outgoing.items()}
        announced = [dist.irecv(size, rank, self._group) for rank, size in sizes.items()]
        sent = [dist.isend(torch.tensor([len(part)]), rank, self._group) for rank, part in data.items()]
        _wait_for(announced)
        received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        arriving = [dist.irecv(part, rank, self._group) for rank, part in received.items()]
        sent += [dist.isend(part, rank, self._group) for rank, part in data.items()]
        _wait_for(arriving + sent)
        return {rank: pickle.loads(part.numpy().data) for rank, part in received.items()}

    def max(self, value: int) -> int:
        """Return the largest value of all ranks: less work than `all_gather`, in as few rounds."""
        distance = 1
        while distance < self.world_size:
            receiver, sender = self._neighbours(distance)
            arriving = torch.empty(1, dtype=torch.int64)
            sent = dist.isend(torch.tensor([value]), receiver, self._group)
            _wait_for([dist.irecv(arriving, sender, self._group), sent])
            value = max(value, int(arriving))
            distance *= 2
        return value

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


def connected_to_store() -> dist.Store:
    """Return a connection of its own to the run's store: one that waits for a key blocks all other calls on it."""
    store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def _as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


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
