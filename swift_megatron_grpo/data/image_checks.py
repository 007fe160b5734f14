"""Refuse rows whose images cannot be trained on, before a model is loaded: every rank checks its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift_megatron_grpo.data.dropped_rows import refuse_rows
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.data.images import UnreadableImage, images_of
from swift_megatron_grpo.data.rows_on_ranks import on_all_ranks

_TAG = "<image>"


@dataclass(frozen=True, slots=True)
class ImagesOfRow:
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
    return on_all_ranks(lambda row: check_row(dataset[row], reader, written), len(dataset))


def check_row(row: dict[str, Any], reader: ImageReader, placeholder_texts: Sequence[str]) -> ImagesOfRow:
    """Read the images of a row. `placeholder_texts`: how the model's placeholders are written."""
    texts = list(_texts(row["messages"]))
    written = next((text for text in placeholder_texts if any(text in content for content in texts)), None)
    images = len(images_of(row))
    if written is not None:
        return ImagesOfRow(images, problem=f"has {written} in its text; images are written {_TAG}")
    if not images:
        return ImagesOfRow(0)  # a tag is text then
    tags = sum(content.count(_TAG) for content in texts) + sum(_image_parts(row["messages"]))
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


def _texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in (*contents, *texts) if isinstance(text, str)]


def _image_parts(messages: Sequence[dict[str, Any]]) -> list[bool]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [isinstance(part, dict) and part.get("type") == "image" for content in contents for part in content]
