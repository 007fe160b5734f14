"""Advice for running out of GPU memory: which flag to change, and to which value."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from swift_megatron_grpo.training.memory.smaller_budget import halved

# How torch names them in its error. Less than a GiB is a CUDA context.
OTHER_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) GiB memory in use")
logger = logging.getLogger(__name__)
RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"


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
    if tokens is not None:
        smaller = halved(tokens, longest)
        if smaller is not None:
            return f"lower {flag} from {tokens} to {smaller}{remedy}"
        return f"{flag} {tokens} cannot be lower: {_longest(longest, train)}"
    if completions > 1:
        return f"lower {flag} from {completions} to {completions // 2}{remedy}"
    return f"{flag} is already 1, and {_longest(longest, train)}"


def _longest(tokens: int, train: bool) -> str:
    return f"the longest completion has {tokens} tokens with its prompt; {_more_parallelism(train)}"


def _more_parallelism(train: bool) -> str:
    layout = "more of --tensor_model_parallel_size, --context_parallel_size or --pipeline_model_parallel_size"
    return f"use {RECOMPUTE}, or {layout}" if train else f"use {layout}"
