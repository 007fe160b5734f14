"""What this rank is: a small typed view of megatron's process groups; and Python objects between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import mpu

from swift_megatron_grpo.failures import RankFailure, SharedFailure

T = TypeVar("T")


@dataclass(frozen=True)
class RankPosition:
    """The layout and this rank's place in it."""

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    tp_group: dist.ProcessGroup
    pp_size: int
    pp_rank: int
    cp_size: int
    cp_rank: int
    cp_group: dist.ProcessGroup
    dp_size: int
    dp_rank: int
    dp_cp_group: dist.ProcessGroup

    @classmethod
    def from_megatron(cls) -> RankPosition:
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            tp_group=mpu.get_tensor_model_parallel_group(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            cp_group=mpu.get_context_parallel_group(),
            dp_size=mpu.get_data_parallel_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )


class Coordinator:
    """Python objects between ranks, over gloo: a slow rollout never meets NCCL's watchdog, the GPU takes no part."""

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def all_gather(self, value: T) -> list[T]:
        gathered: list[T] = [value] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def gather_samples(self, values: dict[int, T], place: RankPosition) -> dict[int, T]:
        """Values by sample, from the ranks that have them to all. Of ranks that hold copies, one speaks."""
        mine = values if place.tp_rank == 0 and place.cp_rank == 0 else {}
        return {index: value for part in self.all_gather(mine) for index, value in part.items()}

    def all_gather_or_raise(self, work: Callable[[], T], what: str) -> list[T]:
        """Runs `work` on every rank and exchanges the results; if any rank failed, all ranks raise the same story."""
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        mine = outcome[1]
        shared = str(mine) if isinstance(mine, SharedFailure) else None
        told = self.all_gather((outcome[0], None if mine is None else f"{type(mine).__name__}: {mine}", shared))
        if mine is not None:
            raise mine
        for _, _, failure in told:
            if failure is not None:
                raise SharedFailure(failure)
        failures = [f"rank {rank}: {story}" for rank, (_, story, _) in enumerate(told) if story is not None]
        if failures:
            raise RankFailure(f"{what} failed on " + "; ".join(failures))
        return [value for value, _, _ in told]  # type: ignore[misc]


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """In-place sum over the world."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """In-place maximum over the world."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
