"""What to do when a pass over micro batches finds no memory: which flag, which value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"


@contextmanager
def out_of_memory_advice(phase: str, rank: int, advice: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"rank {rank} ran out of GPU memory in {phase}: {advice}. {error}") from error


def smaller_micro_batches(flag: str, tokens: int | None, completions: int, longest: int, train: bool) -> str:
    """`flag` is the one that holds the budget in tokens, or in completions if that is None."""
    remedy = f", or {RECOMPUTE}" if train else ""
    if tokens is not None:
        smaller = max(tokens // 2, longest)
        if smaller < tokens:
            return f"lower {flag} from {tokens} to {smaller}{remedy}"
        return f"{flag} {tokens} just holds the longest completion with its prompt, {longest} tokens: {_split(train)}"
    if completions > 1:
        return f"lower {flag} from {completions} to {completions // 2}{remedy}"
    return f"{flag} is 1 and the longest completion with its prompt has {longest} tokens: {_split(train)}"


def _split(train: bool) -> str:
    layout = "more of --tensor_model_parallel_size, --context_parallel_size or --pipeline_model_parallel_size"
    return f"use {RECOMPUTE}, or {layout}" if train else f"use {layout}"
