"""Prompts longer than --max_length, for --truncation_strategy delete and raise: found before a model loads.

Which rows are trained then depends neither on ranks nor on a resume, unlike with a row that is replaced when it cannot
be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.data.image_checks import ImagesOfRow
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.data.rows_on_ranks import on_all_ranks
from swift_megatron_grpo.types import Prompt

logger = get_logger()
STRATEGIES = ("delete", "raise")
_LISTED = 5


def without_long_prompts(
    dataset: Any,
    images: Sequence[ImagesOfRow],
    template: Template,
    *,
    request: Callable[[Prompt], Any],
    max_length: int | None,
    strategy: str,
    name: str,
) -> Any:
    """Return the rows of a dataset whose prompts fit. Every rank calls this, and encodes its share of the rows.

    An image counts with all its tokens. `request`: turns a prompt into what the template encodes. `name`: the flag of
    the dataset, for messages. Raises ValueError for the first rows that do not fit if the strategy is "raise", and if
    no row is left.
    """
    if max_length is None or strategy not in STRATEGIES:
        return dataset
    prompts = PromptSource(dataset, 0, shuffle=False, default_system=template.template_meta.default_system)
    encoder = copy(template)
    encoder.max_length = None
    encoder.set_mode("vllm")  # as the engine encodes them

    def length(row: int) -> int:
        prompts.taken = row
        [prompt] = prompts.take(1)
        expansion = images[row].tokens - images[row].images  # in place of one placeholder per image
        return len(encoder.encode(request(prompt))["input_ids"]) + expansion

    long = find_long(on_all_ranks(length, len(dataset)), max_length)
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
