"""Checks that open the images and encode the prompt of every row, before a model loads: each rank does a share.

Prompts longer than --max_length are shortened, left out or refused here (--truncation_strategy). Which rows are trained
then depends neither on ranks nor on a resume, unlike with a row that is replaced when it cannot be encoded.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from swift.template import Template

from swift_megatron_grpo.data.checks import refuse_rows, row_name
from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.data.image_formats import placeholder_texts
from swift_megatron_grpo.data.image_reader import ImageReader, Medium
from swift_megatron_grpo.data.images import (
    MAX_BYTES,
    MAX_PIXELS,
    UnreadableImage,
    check_sent,
    check_whole,
    file_name,
    image_bytes,
    images_of,
    with_listed_images,
)
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.data.recordings import UnreadableRecording, as_heard, recording_bytes, recordings_of
from swift_megatron_grpo.data.teacher_prompts import COLUMN, teacher_prompt
from swift_megatron_grpo.data.videos import UnreadableVideo, videos_of
from swift_megatron_grpo.types import ModelFrames, Prompt

_TAG = "<image>"
_TAG_OF_A_VIDEO = "<video>"
_TAG_OF_A_RECORDING = "<audio>"
_TAG_OF_A_FILE = "<img>.+?</img>"  # which ms-swift's template would open, and an engine leaves as text
_LISTED = 5  # long prompts that a message names
_OF_A_TURN = 64  # more tokens than a chat template adds to a turn
T = TypeVar("T")


def on_all_ranks(work: Callable[[int], T], rows: int) -> list[T]:
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
    """Images, videos and recordings of a row, their number of tokens, and what is wrong with them."""

    images: int
    tokens: int = 0
    problem: str | None = None
    recordings: int = 0
    videos: int = 0


def read_images(dataset: Any, template: Any, takes_images: bool, sent: bool) -> list[ImagesOfRow]:
    """Return what every row has. Every rank calls this, and opens its share of the images. `sent`: to servers."""
    if not takes_images:
        return [ImagesOfRow(0)] * len(dataset)
    reader = ImageReader(template)
    written = placeholder_texts(template.processor)
    return on_all_ranks(lambda row: check_row(dataset[row], reader, written, sent), len(dataset))


def check_row(
    row: dict[str, Any], reader: ImageReader, placeholder_texts: Sequence[str], sent: bool = False
) -> ImagesOfRow:
    """Read the images of a row. `placeholder_texts`: how the model's placeholders are written."""
    row = with_listed_images(row)
    contents = [message["content"] for message in row["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = [text for text in (*contents, *(part.get("text") for part in parts)) if isinstance(text, str)]
    images = len(images_of(row))
    no_text = re.compile("|".join([*map(re.escape, placeholder_texts), _TAG_OF_A_FILE]))
    if written := next(filter(None, map(no_text.search, texts)), None):
        return ImagesOfRow(images, problem=f"has {written[0]:.200} in its text; images are written {_TAG}")
    recordings, videos = recordings_of(row), videos_of(row)
    for tag, name, column, there, is_taken in (
        (_TAG_OF_A_RECORDING, "recordings", "audios", len(recordings), reader.recordings is not None),
        (_TAG_OF_A_VIDEO, "videos", "videos", len(videos), reader.videos is not None),
        (_TAG, "images", "images", images, True),
    ):
        tags = sum(text.count(tag) for text in texts) if is_taken else 0
        if tags > there:
            return ImagesOfRow(images, problem=f"has {tags} tags {tag} for {there} {name} in the column {column}")
    files = []
    for source in images_of(row):
        try:
            files.append(image_bytes(source))
        except UnreadableImage as error:
            return ImagesOfRow(images, problem=f"has an image that {error}")
        try:
            check_whole(files[-1])
            if sent:
                check_sent(files[-1], MAX_PIXELS, most_bytes=MAX_BYTES)
        except UnreadableImage as error:
            return ImagesOfRow(images, problem=f"has the image {file_name(source)}, which {error}")
        except ValueError as error:
            return ImagesOfRow(images, problem=f"has the image {file_name(source)}, which servers refuse: it {error}")
    try:
        read = reader.read(row, files)
    except ValueError as error:  # of the processor: sides too different
        return ImagesOfRow(images, problem=f"has an image that cannot be resized: {error}")
    try:
        frames = reader.frames_of(row)
        if frames and isinstance(frames[0], ModelFrames):  # none begins with its sound
            frames[0].encode()
    except UnreadableVideo as error:
        return ImagesOfRow(images, problem=f"has a video that {error}")
    sounds = len(videos) if reader.plays_sound else 0
    if sounds and recordings:
        return ImagesOfRow(images, problem="has recordings and videos with sound; vLLM hears one of the two in a row")
    try:
        heard = [reader.recording(as_heard(recording_bytes(source))) for source in recordings]
    except UnreadableRecording as error:
        return ImagesOfRow(images, problem=f"has a recording that {error}")
    media: list[Medium] = [*read, *frames, *heard]
    tokens = sum(map(reader.length_of, media))
    return ImagesOfRow(images, tokens, recordings=len(heard) + sounds, videos=len(videos))


def check_images(
    dataset: Any, checked: Sequence[ImagesOfRow], max_model_len: int | None, max_completion_length: int
) -> int:
    """Raise ValueError for rows with problems. Return the largest number of images in a row."""
    problems = [(row, images.problem) for row, images in enumerate(checked) if images.problem is not None]
    refuse_rows(
        dataset,
        problems,
        "have images, videos or recordings that cannot be trained",
        "; correct these rows, or remove them",
    )
    if max_model_len is not None:
        # vLLM cuts completions that are longer than what a prompt leaves, as a note on the flags says
        room = max_model_len - max_completion_length if max_completion_length < max_model_len else max_model_len
        longest = max((images.tokens for images in checked), default=0)
        refuse_rows(
            dataset,
            [(row, f"has {images.tokens}") for row, images in enumerate(checked) if images.tokens >= room],
            f"have more tokens of media than the {room} that --vllm_max_model_len {max_model_len} and "
            f"--max_completion_length {max_completion_length} leave for a prompt",
            f"; use a smaller --max_pixels, or --vllm_max_model_len above {longest + max_completion_length}",
        )
    return max((images.images for images in checked), default=0)


# ---- prompts


class EncodedRow(NamedTuple):
    """Tokens of a prompt, the last messages that fit if it is too long, and why it cannot be encoded."""

    tokens: int
    kept: int = 0
    problem: str | None = None


def check_prompts(
    dataset: Any,
    images: Sequence[ImagesOfRow],
    template: Template,
    *,
    request: Callable[[Prompt], Any],
    max_length: int | None,
    strategy: str,
    name: str,
) -> tuple[Any, str | None]:
    """Return the rows whose prompts can be encoded and fit, and a note on long ones. Every rank encodes its share.

    With the strategy "left" a prompt of several turns loses its oldest ones; an image then counts as one token, as in
    ms-swift, and otherwise with all its tokens. `request`: turns a prompt into what the template encodes. `name`: the
    flag of the dataset, for messages. Raises ValueError for rows that cannot be encoded, and for those that are too
    long unless the strategy is "delete".
    """
    encoded = _encode(dataset, images, template, request, max_length, strategy)
    problems = [(row, each.problem) for row, each in enumerate(encoded) if each.problem is not None]
    refuse_rows(dataset, problems, "cannot be encoded", "; correct these rows, or remove them")
    long = {row: each for row, each in enumerate(encoded) if max_length is not None and each.tokens > max_length}
    if not long:
        return dataset, None
    listed = ", ".join(f"{row_name(dataset, row)} has {long[row].tokens} tokens" for row in list(long)[:_LISTED])
    more = ", ..." if len(long) > _LISTED else ""
    found = (
        f"--{name}: {len(long)} of {len(dataset)} prompts are longer than --max_length {max_length} ({listed}{more})"
    )
    if strategy == "left" and all(each.kept for each in long.values()):
        shorter = _without_oldest_turns(dataset, long)
        return shorter, f"{found}; their oldest turns are left out (--truncation_strategy left)"
    if strategy == "delete" and len(long) < len(dataset):
        kept = [row for row in range(len(dataset)) if row not in long]
        return dataset.select(kept), f"{found}; they are left out (--truncation_strategy delete)"
    others = "" if len(long) == len(dataset) else ", or --truncation_strategy delete to leave them out"
    raise ValueError(f"{found}; use --max_length {max(each.tokens for each in long.values())}{others}")


def check_teacher_prompts(
    dataset: Any, template: Template, request: Callable[[Prompt], Any], max_length: int | None
) -> bool:
    """Return whether rows have a prompt for the teacher. Raise ValueError for those that it cannot read.

    Every rank encodes its share.
    """
    texts = dataset[COLUMN] if COLUMN in dataset.column_names else []
    wrong = [(row, f"has one of type {type(text).__name__}") for row, text in enumerate(texts) if not _is_text(text)]
    refuse_rows(dataset, wrong, f"have no text in the column {COLUMN}", "; use texts, or remove the column")
    if not any(texts):
        return False
    prompts = PromptSource(dataset, 0, shuffle=False, default_system=template.template_meta.default_system)
    encoder = encoder_of(template)

    def length(row: int) -> int:
        prompts.taken = row
        [prompt] = prompts.take(1)
        return len(encoder.encode(request(teacher_prompt(prompt)))["input_ids"])

    lengths = on_all_ranks(length, len(dataset))
    long = [(row, f"has {tokens}") for row, tokens in enumerate(lengths) if max_length and tokens > max_length]
    advice = f"; use --max_length {max(lengths)}, or shorter texts"
    refuse_rows(dataset, long, f"have a {COLUMN} of more tokens than --max_length {max_length}", advice)
    return True


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _encode(
    dataset: Any,
    images: Sequence[ImagesOfRow],
    template: Template,
    request: Callable[[Prompt], Any],
    max_length: int | None,
    strategy: str,
) -> list[EncodedRow]:
    """Encode every prompt that may be too long, or that has not the form that every template can encode."""
    limit = math.inf if max_length is None else max_length
    prompts = PromptSource(dataset, 0, shuffle=False, default_system=template.template_meta.default_system)
    encoder = encoder_of(template)

    def length(prompt: Prompt) -> int:
        return len(encoder.encode(request(prompt))["input_ids"])

    def fitting(prompt: Prompt) -> int:
        """Return the number of the last messages that fit, from a turn of the user on; 0 if there is no such turn."""
        messages = prompt.row["messages"]
        turns = [len(messages) - place for place, message in enumerate(messages) if message["role"] == "user"]
        rest = ((kept, Prompt("", {**prompt.row, "messages": _last_turns(messages, kept)})) for kept in turns[1:])
        return next((kept for kept, shorter in rest if length(shorter) <= limit), 0)

    def encoded(row: int) -> EncodedRow:
        prompts.taken = row
        [prompt] = prompts.take(1)
        shown = images[row]
        media = shown.images + shown.videos + shown.recordings
        expansion = 0 if strategy == "left" else shown.tokens - media  # in place of one placeholder each
        bound = _most_tokens(prompt.row)
        if bound is not None and bound + expansion <= limit:
            return EncodedRow(0)
        try:
            tokens = length(prompt) + expansion
            if tokens <= limit or strategy != "left" or media:
                return EncodedRow(tokens)
            return EncodedRow(tokens, kept=fitting(prompt))
        except Exception as error:  # whatever ms-swift and the tokenizer raise
            return EncodedRow(0, problem=f"raises {type(error).__name__}: {str(error)[:300]}")

    return on_all_ranks(encoded, len(dataset))


def _most_tokens(row: dict[str, Any]) -> int | None:
    """Return a limit on a prompt's tokens, of at least one byte each; None if only encoding it can tell."""
    messages = row["messages"]
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    alternates = all(message["role"] == ("user", "assistant")[place % 2] for place, message in enumerate(turns))
    if row.get("tools") or not alternates or not all(isinstance(message["content"], str) for message in messages):
        return None
    return sum(len(message["content"].encode()) + _OF_A_TURN for message in messages) + _OF_A_TURN


def _last_turns(messages: Sequence[dict[str, Any]], kept: int) -> list[dict[str, Any]]:
    """Return the last messages, so many, after the system message."""
    head = messages[:1] if messages[0]["role"] == "system" else []
    return [*head, *messages[-kept:]]


def _without_oldest_turns(dataset: Any, long: dict[int, EncodedRow]) -> Any:
    """Return the dataset with shorter conversations in place of the long ones."""
    shorter = [
        {**dataset[row], "messages": _last_turns(dataset[row]["messages"], each.kept)} for row, each in long.items()
    ]
    order = list(range(len(dataset)))
    for place, row in enumerate(long, start=len(dataset)):
        order[row] = place
    return concatenate_datasets([dataset, Dataset.from_list(shorter, features=dataset.features)]).select(order)
