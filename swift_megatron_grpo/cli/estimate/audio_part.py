"""Estimate the bytes that the audio part of a Qwen-Omni keeps for backward. Pure Python.

It cuts a recording into chunks of a second, and three convolutions turn each into 13 tokens. What they keep is most of
it, and no checkpointing drops it: 8 MB for a second of Qwen3-Omni. The sums are over the tensors that transformers'
class saves; tests/unit/cli/estimate counts them.
"""

from dataclasses import dataclass

CHUNK_TOKENS = 13
_CHUNK_FRAMES = 100
_LONGEST = 30 * CHUNK_TOKENS  # tokens of a recording, which is embedded by itself
# Numbers that a layer saves for each channel: inputs and outputs of two norms, queries, keys and values, the kernel's
# outputs for each part of a recording, and all of them in one tensor.
_LAYER = 4 + 3 + 2


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Sizes of an audio part. Widths are in channels."""

    layers: int
    hidden: int
    ffn: int
    bins: int  # of a frame
    channels: int  # of the convolutions
    rows: int  # of the language model, for each token


def bytes_of_audio_part(part: AudioPart, tokens: int, trains_tower: bool, trains_aligner: bool, checkpointing: bool,
                        item: int = 2) -> float:  # fmt: skip
    """Return what the audio part keeps for backward of recordings of so many tokens, with those of whole chunks.

    The aligner is two matrices, with an activation between them. `checkpointing`: layers keep their inputs alone.
    """
    if not trains_tower and not trains_aligner:
        return 0.0
    aligner = 3 * part.hidden * tokens
    if not trains_tower:
        return float(aligner * item)
    layers = part.layers * (part.hidden if checkpointing else _numbers_of_layer(part))
    return float((_numbers_of_convolutions(part, tokens) + (layers + part.hidden) * tokens + aligner) * item)


def bytes_at_one_time(part: AudioPart, tokens: int, item: int = 2) -> float:
    """Return what a recording needs that keeps nothing: the output of its first convolution, and its activation."""
    chunks = min(tokens, _LONGEST) / CHUNK_TOKENS
    return float(2 * chunks * part.channels * _halved(part.bins) * _halved(_CHUNK_FRAMES) * item)


def _numbers_of_layer(part: AudioPart) -> int:
    return _LAYER * part.hidden + 2 * part.ffn


def _numbers_of_convolutions(part: AudioPart, tokens: int) -> float:
    """Return the input, and for each of three convolutions its output before and after the activation."""
    bins, frames = part.bins, _CHUNK_FRAMES
    numbers = bins * frames
    for _ in range(3):
        bins, frames = _halved(bins), _halved(frames)
        numbers += 2 * part.channels * bins * frames
    return numbers * tokens / CHUNK_TOKENS


def _halved(size: int) -> int:
    return -(-size // 2)
