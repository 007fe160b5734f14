"""The workload of both trainers: lengths drawn from a seed, prompts of exactly those lengths, and their FLOPs."""

from __future__ import annotations

import json
import random
import wave
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.harness.lengths import Lengths
from swift_megatron_grpo.packing.flops import FlopsModel

from .shapes import SHAPES, Shape

_SAMPLING_RATE = 16000  # of recordings, that of Qwen-Omni
FILLER = "x"  # one token of the byte-level tokenizer
TEMPLATE_TOKENS_FILE = "tokens_around_a_prompt"  # in a checkpoint's folder, written last; see models.py
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # name in config.json: text in the tokenizer
AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")  # the same names of a Qwen-Omni


@dataclass(frozen=True, slots=True)
class Workload:
    """Completions of one optimizer step; every step has the same lengths and different tokens."""

    shape: str
    completions: int
    generations: int
    lengths: str  # of completions
    prompt_lengths: str
    seed: int

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape {self.shape!r} is unknown; use one of {', '.join(SHAPES)}")
        if self.completions % self.generations:
            raise ValueError(f"{self.completions} completions are not divisible into groups of {self.generations}")
        Lengths(self.lengths), Lengths(self.prompt_lengths)

    @property
    def rows(self) -> int:
        return self.completions // self.generations

    def completion_tokens(self) -> list[list[int]]:
        """Return the lengths of all completions, [row][completion of the row]."""
        drawn = Lengths(self.lengths).draw(self.completions, random.Random(f"completions {self.seed}"))
        return [drawn[i : i + self.generations] for i in range(0, self.completions, self.generations)]

    def prompt_tokens(self, at_least: int) -> list[int]:
        """Return the lengths of all prompts, [row]; none is shorter than `at_least`, for the chat template's tokens."""
        drawn = Lengths(self.prompt_lengths).draw(self.rows, random.Random(f"prompts {self.seed}"))
        return [max(at_least, tokens) for tokens in drawn]


def training_flops(
    shape: Shape, prompts: list[int], completions: list[list[int]], adapters: bool = False, shared: bool = False
) -> float:
    """Return the FLOPs that a model needs for forward and backward of one step.

    The number is the same for both trainers, whatever they compute in addition. A multiplication and an addition count
    as two FLOPs. Only half of the attention scores count, because of the causal mask, and the output layer counts on
    completion tokens only, because other tokens have no loss. Backward counts twice as much as forward, and with
    adapters, where the model's weights have no gradient, as much as forward. Recomputation does not count, and of a
    mixture of experts only those that a token passes through. `shared`: a prompt counts once per group.
    """
    model = FlopsModel.of_transformer(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn * shape.experts_per_token + shape.shared_ffn,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        delta_nets=shape.delta_nets,
    )
    passes = 2 if adapters else 3
    flops = 0.0
    for prompt, group in zip(prompts, completions, strict=True):
        bundles = [group] if shared else [[tokens] for tokens in group]
        for one in bundles:
            copies = (len(one) - 1) * model.of_sequence(prompt, 0)
            flops += sum(model.of_sequence(prompt + tokens, tokens) for tokens in one) - copies
    return passes * flops


def flops_as_verl_counts(shape: Shape, prompts: list[int], completions: list[list[int]]) -> float | None:
    """Return the FLOPs of one step as verl's flops_counter.py has them, for comparisons with published figures.

    All attention scores count, as if there were no causal mask, embedding and output layer count for all tokens, and so
    does a prompt for each of its completions. None: verl has no formula for linear attention.
    """
    if shape.delta_nets is not None:
        return None
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    router = shape.hidden * shape.experts
    feed_forward = 3 * shape.hidden * shape.ffn * shape.experts_per_token + router
    of_layer = feed_forward + shape.hidden * (2 * queries + 2 * keys)
    parameters = shape.layers * of_layer + 2 * shape.hidden * shape.vocabulary
    lengths = [prompt + tokens for prompt, group in zip(prompts, completions, strict=True) for tokens in group]
    scores = 12.0 * sum(length**2 for length in lengths) * queries * shape.layers
    return 6.0 * parameters * sum(lengths) + scores


def row_of(content: str) -> int:
    """Return the dataset row of a prompt; its text begins with that number."""
    return int(content.split(" ", 1)[0])


def places(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield each row with its place in the group: the number of earlier entries of the row, as groups are whole."""
    counts: Counter[int] = Counter()
    for row in rows:
        yield row, counts[row]
        counts[row] += 1


def reward_of(completion: str) -> float:
    """Return a reward that differs between completions and is the same for all trainers and in every run."""
    return zlib.crc32(completion.encode()) / 2**32


def write_dataset(path: Path, prompts: list[int], template_tokens: int, shape: Shape | None = None) -> None:
    """Write prompts of the given lengths, which include `template_tokens` from the chat template.

    `shape`: whose rows have an image, or every other one a recording. They are noise, and the lengths do not include
    their tokens.
    """
    with path.open("w") as file:
        for row, tokens in enumerate(prompts):
            number = f"{row} "
            content = number + FILLER * (tokens - template_tokens - len(number))
            media: dict[str, list[str]] = {}
            if shape is not None and shape.image_side:
                content += "<image>"
                media["images"] = [str(write_image(path.with_name(f"{path.stem}-{row}.jpg"), shape.image_side, row))]
            if shape is not None and shape.audio_seconds and row % 2:
                content += "<audio>"
                media["audios"] = [str(write_audio(path.with_name(f"{path.stem}-{row}.wav"), shape.audio_seconds, row))]
            file.write(json.dumps({"messages": [{"role": "user", "content": content}], **media}) + "\n")


def write_image(path: Path, side: int, seed: int) -> Path:
    pixels = random.Random(seed).randbytes(3 * side**2)
    Image.frombytes("RGB", (side, side), pixels).save(path, quality=90)
    return path


def write_audio(path: Path, seconds: int, seed: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLING_RATE)
        file.writeframes(random.Random(seed).randbytes(2 * _SAMPLING_RATE * seconds))
    return path
