"""Checks that open the images and encode the prompt of every row, before a model loads: each rank does a share.

Prompts longer than --max_length are left out or refused here (--truncation_strategy delete and raise). Which rows are
trained then depends neither on ranks nor on a resume, unlike with a row that is replaced when it cannot be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.data.checks import refuse_rows
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.data.images import UnreadableImage, images_of
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.types import Prompt

logger = get_logger()
_TAG = "<image>"
_LISTED = 5  # long prompts that a message names

T = TypeVar("T")


def _on_all_ranks(work: Callable[[int], T], rows: int) -> list[T]:
    """Return the result for every row; rank r works on rows r, r + ranks, ... A dry run has one process."""
    if not dist.is_initialized():
        return [work(row) for row in range(rows)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * ranks
    share: list[T] | Exception
    try:
        share = [work(row) for row in range(rank, rows, ranks)]
    except Exception as error:  # a rank that left here would keep the others waiting
        share = error
    dist.all_gather_object(shares, share)
    results: list[Any] = [None] * rows
    for first, values in enumerate(shares):
        if isinstance(values, Exception):
            raise values
        results[first::ranks] = values
    return results


# ---- images


class ImagesOfRow(NamedTuple):
    """Images of a row, their number of tokens, and what is wrong with them."""

    images: int
    tokens: int = 0
    problem: str | None = None


def read_images(dataset: Any, template: Any, takes_images: bool) -> list[ImagesOfRow]:
    """Return what every row has. Every rank calls this, and opens its share of the images."""
    if not takes_images or "images" not in dataset.column_names:
        return [ImagesOfRow(0)] * len(dataset)
    reader = ImageReader(template)
    written = [template.processor.image_token, template.processor.video_token]
    return _on_all_ranks(lambda row: check_row(dataset[row], reader, written), len(dataset))


def check_row(row: dict[str, Any], reader: ImageReader, placeholder_texts: Sequence[str]) -> ImagesOfRow:
    """Read the images of a row. `placeholder_texts`: how the model's placeholders are written."""
    contents = [message["content"] for message in row["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = [text for text in (*contents, *(part.get("text") for part in parts)) if isinstance(text, str)]
    images = len(images_of(row))
    for written in placeholder_texts:
        if any(written in text for text in texts):
            return ImagesOfRow(images, problem=f"has {written} in its text; images are written {_TAG}")
    if not images:
        return ImagesOfRow(0)  # a tag is text then
    tags = sum(text.count(_TAG) for text in texts) + sum(part.get("type") == "image" for part in parts)
    if tags > images:
        return ImagesOfRow(images, problem=f"has {tags} tags {_TAG} for {images} images")
    try:
        read = reader.images(row)
    except UnreadableImage as error:
        return ImagesOfRow(images, problem=f"has an image that {error}")
    except ValueError as error:  # of the processor: sides too different
        return ImagesOfRow(images, problem=f"has an image that cannot be resized: {error}")
    return ImagesOfRow(images, sum(map(reader.format.length_of, read)))


def check_images(checked: Sequence[ImagesOfRow], max_model_len: int | None, max_completion_length: int) -> int:
    """Raise ValueError for rows with problems. Return the largest number of images in a row."""
    problems = [(row, images.problem) for row, images in enumerate(checked) if images.problem is not None]
    refuse_rows(problems, len(checked), "have images that cannot be trained", "; correct these rows, or remove them")
    if max_model_len is not None:
        room = max_model_len - max_completion_length
        longest = max((images.tokens for images in checked), default=0)
        refuse_rows(
            [(row, f"has {images.tokens}") for row, images in enumerate(checked) if images.tokens >= room],
            len(checked),
            f"have more tokens of images than the {room} that --vllm_max_model_len {max_model_len} and "
            f"--max_completion_length {max_completion_length} leave for a prompt",
            f"; use a smaller --max_pixels, or --vllm_max_model_len above {longest + max_completion_length}",
        )
    return max((images.images for images in checked), default=0)


# ---- long prompts


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
    if max_length is None or strategy not in ("delete", "raise"):
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

    lengths = dict(enumerate(_on_all_ranks(length, len(dataset))))
    long = {row: tokens for row, tokens in lengths.items() if tokens > max_length}
    if not long:
        return dataset
    listed = ", ".join(f"row {row} has {long[row]} tokens" for row in list(long)[:_LISTED])
    more = ", ..." if len(long) > _LISTED else ""
    found = (
        f"--{name}: {len(long)} of {len(dataset)} prompts are longer than --max_length {max_length} ({listed}{more})"
    )
    if strategy == "raise" or len(long) == len(dataset):
        others = "left to cut them" if len(long) == len(dataset) else "left to cut them or delete to leave them out"
        raise ValueError(f"{found}; use --max_length {max(long.values())}, or --truncation_strategy {others}")
    logger.info(f"{found}; they are left out (--truncation_strategy delete)")
    return dataset.select([row for row in lengths if row not in long])
