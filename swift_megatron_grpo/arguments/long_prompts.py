"""Prompts longer than --max_length, for --truncation_strategy delete and raise: found before a model loads.

Which rows are trained then depends neither on ranks nor on a resume, unlike with a row that is replaced when it cannot
be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch.distributed as dist
from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.requests import infer_request

logger = get_logger()
STRATEGIES = ("delete", "raise")
_LISTED = 5


def without_long_prompts(dataset: Any, template: Template, max_length: int | None, strategy: str, name: str) -> Any:
    """Return the rows of a dataset whose prompts fit. Every rank calls this, and encodes its share of the rows.

    `name`: the flag of the dataset, for messages. Raises ValueError for the first rows that do not fit if the strategy
    is "raise", and if no row is left.
    """
    if dataset is None or max_length is None or strategy not in STRATEGIES:
        return dataset
    prompts = PromptSource(dataset, 0, shuffle=False, default_system=template.template_meta.default_system)
    encoder = copy(template)
    encoder.max_length = None
    encoder.set_mode("vllm")  # as the engine encodes them

    def length(row: int) -> int:
        prompts.taken = row
        [prompt] = prompts.take(1)
        return len(encoder.encode(infer_request(prompt))["input_ids"])

    long = find_long(_on_all_ranks(length, len(dataset)), max_length)
    if not long:
        return dataset
    listed = ", ".join(f"row {row} has {tokens} tokens" for row, tokens in long[:_LISTED])
    found = f"--{name}: {len(long)} of {len(dataset)} prompts are longer than --max_length {max_length} ({listed}"
    found += ", ...)" if len(long) > _LISTED else ")"
    longest = max(tokens for _, tokens in long)
    if strategy == "raise" or len(long) == len(dataset):
        others = "left to cut them" if len(long) == len(dataset) else "left to cut them or delete to leave them out"
        raise ValueError(f"{found}; use --max_length {longest}, or --truncation_strategy {others}")
    logger.info(f"{found}; they are left out (--truncation_strategy delete)")
    left_out = {row for row, _ in long}
    return dataset.select([row for row in range(len(dataset)) if row not in left_out])


def find_long(lengths: Sequence[int], max_length: int) -> list[tuple[int, int]]:
    """Return row and length of every prompt above the limit."""
    return [(row, tokens) for row, tokens in enumerate(lengths) if tokens > max_length]


def _on_all_ranks(length: Callable[[int], int], rows: int) -> list[int]:
    """Return the length of every row; rank r encodes rows r, r + ranks, ..."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[list[int] | Exception] = [[]] * ranks
    share: list[int] | Exception
    try:
        share = [length(row) for row in range(rank, rows, ranks)]
    except Exception as error:  # a rank that left here would keep the others waiting
        share = error
    dist.all_gather_object(shares, share)
    for failed in shares:
        if isinstance(failed, Exception):
            raise failed
    lengths = [0] * rows
    for first, values in enumerate(shares):
        assert isinstance(values, list)
        lengths[first::ranks] = values
    return lengths
