"""Running out of GPU memory: the pass runs again with half the token budget, or the error names a flag to change.

Losses do not depend on how completions are packed, so the step is the same. The smaller budget is kept.

A pass is repeated only with data parallelism alone, where a rank's forward and backward wait for no other rank:
elsewhere the others would wait in a collective of the pass that one rank has left. Before gradients are reduced, ranks
agree whether all of them had enough memory.
"""

import gc
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from mcore_bridge import ModelConfig
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.runtime.parallel import RankPosition

# How torch names them in its error. Less than a GiB is a CUDA context.
OTHER_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) GiB memory in use")
logger = logging.getLogger(__name__)
RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"


class PeerOutOfMemory(Exception):
    """Another data-parallel rank ran out of GPU memory in this step, so no rank may reduce its gradients."""


class MemoryAgreement:
    """Exchanges between the data-parallel ranks of a step whether one of them ran out of memory.

    `group`: None if a step cannot be run again with a smaller budget. Then nothing is exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._failed = torch.zeros(1, device=torch.cuda.current_device())  # there may be no memory for it later
        self._reached = self._any_failed(False)  # the first exchange allocates buffers

    def start_step(self) -> None:
        self._reached = False

    def before_reduction(self) -> None:
        """Call when forward and backward are done; raises PeerOutOfMemory if another rank ran out of memory."""
        if self._any_failed(False):
            raise PeerOutOfMemory("another data-parallel rank ran out of GPU memory in this step")
        self._reached = True

    def report_failure(self) -> bool:
        """Call on a rank that ran out of memory; return False if it is too late, or the step cannot be run again."""
        if self._group is None or self._reached:
            return False
        self._any_failed(True)
        return True

    def _any_failed(self, failed: bool) -> bool:
        if self._group is None:
            return False
        self._failed.fill_(failed)
        dist.all_reduce(self._failed, op=dist.ReduceOp.MAX, group=self._group)
        return bool(self._failed.item())


def agreement_of(
    models: list[MegatronModule], config: ModelConfig, parallel: RankPosition, max_tokens: int | None
) -> MemoryAgreement:
    """Return how the ranks of this layout agree."""
    wrapped = models[0]
    runs_again = (
        max_tokens is not None
        and passes_are_independent(config, parallel)
        and isinstance(wrapped, DistributedDataParallel)
        and not wrapped.ddp_config.overlap_grad_reduce  # else gradients are reduced during backward
    )
    return MemoryAgreement(parallel.dp_cp_group if runs_again else None)


def passes_are_independent(config: ModelConfig, parallel: RankPosition) -> bool:
    """Return True if forward and backward of one rank wait for no other rank."""
    sizes = (parallel.tp_size, parallel.pp_size, parallel.cp_size, config.expert_model_parallel_size)
    return set(sizes) == {1} and (config.expert_tensor_parallel_size or 1) == 1


def halved(budget: int, longest: int) -> int | None:
    """Return half the budget, but room for the longest sample; None: micro batches cannot be smaller."""
    smaller = max(budget // 2, longest)
    return smaller if smaller < budget else None


def free_memory() -> None:
    """Free what a pass that failed has left: its activations are in frames that refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def out_of_memory_advice(phase: str, rank: int, advice: Callable[[], str]) -> Iterator[None]:
    """Add rank, phase and advice to torch's out-of-memory error, and log other processes that hold memory of the GPU.

    They are logged even if the error is handled: a run that continues with a smaller budget is slower than it needs to
    be while the remains of a killed run hold memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        holders = [f"process {number} holds {size} GiB of it" for number, size in OTHER_PROCESS.findall(str(error))]
        if holders:
            logger.warning(
                f"rank {rank} ran out of the GPU's memory, and {' and '.join(holders)}; end what is not of this run"
            )
        raise torch.OutOfMemoryError(f"rank {rank} ran out of GPU memory in {phase}: {advice()}. {error}") from error


def smaller_micro_batches(flag: str, tokens: int | None, completions: int, longest: int, train: bool) -> str:
    """Return advice to lower `flag`, the budget of a micro batch in tokens or, if `tokens` is None, in completions."""
    remedy = f", or {RECOMPUTE}" if train else ""
    layout = "more of --tensor_model_parallel_size, --context_parallel_size or --pipeline_model_parallel_size"
    use = f"use {RECOMPUTE}, or {layout}" if train else f"use {layout}"
    no_smaller = f"the longest completion has {longest} tokens with its prompt; {use}"
    if tokens is not None:
        smaller = halved(tokens, longest)
        if smaller is not None:
            return f"lower {flag} from {tokens} to {smaller}{remedy}"
        return f"{flag} {tokens} cannot be lower: {no_smaller}"
    if completions > 1:
        return f"lower {flag} from {completions} to {completions // 2}{remedy}"
    return f"{flag} is already 1, and {no_smaller}"
