"""Estimate the bytes of an image part: what it keeps for backward, and its rows. Pure Python.

The sums are over the tensors that transformers' classes save in bf16; tests/unit/cli/estimate counts them on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

PATCHES = 4  # for which a token stands

# Numbers that a block saves for each of its channels. Attention: the projection's output, because the values are a view
# of it, queries and keys with positions, the kernel's output and its copy as one tensor.
_ATTENTION = 3 + 2 + 1 + 1
_LAYER_NORM = 2  # input and output
_RMS_NORM = 4  # the input in fp32, and the output before and after it is scaled


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Sizes of an image part of one of the types that train on images. Widths are in channels."""

    layers: int
    hidden: int
    ffn: int
    feed_forward: int  # tensors with `ffn` channels that a block saves
    rms_norms: bool
    values: int  # of a patch
    rows: int  # of the language model, for each token
    deepstack: int = 0  # of its first layers to which rows are added (Qwen3-VL)
    aligner_ffn: int = 0  # of an aligner with a gated feed-forward, behind a convolution (GLM-V); 0: two matrices
    shuffles: bool = False  # the aligner takes four patches as one, and is two matrices of a row's width (InternVL)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens that stand for images, on the data-parallel rank that has most."""

    shown: int = 0  # in the largest micro batch, once for each completion that shows the image
    distinct: int = 0  # the same, each image once
    of_rollout: int = 0  # of all steps of a rollout, each image once


def bytes_of_vision_tower(tower: VisionTower, tokens: int, trains_tower: bool, trains_aligner: bool,
                          checkpointing: bool, item: int = 2) -> float:  # fmt: skip
    """Return what the vision tower keeps for backward, for images of so many tokens. `item`: bytes of a number.

    The aligner ("merger") turns the outputs of blocks into rows. `checkpointing`: blocks keep their inputs alone.
    """
    if not trains_tower and not trains_aligner:
        return 0.0
    hidden, mergers = tower.hidden, 1 + tower.deepstack
    blocks = tower.layers * (hidden if checkpointing else _numbers_of_block(tower))
    if tower.aligner_ffn:
        # Norms before and behind the blocks, of which the first is only added to, and the input of the convolution.
        # The aligner works on tokens, and has one row for four patches.
        blocks += (2 * _RMS_NORM - 1 + 1) * hidden
        aligner = 4 * tower.rows + 4 * tower.aligner_ffn
    elif tower.shuffles:
        aligner = _LAYER_NORM * PATCHES * hidden + 2 * tower.rows
    elif not trains_tower:
        aligner = PATCHES * 4 * hidden * mergers
    else:
        aligner = PATCHES * hidden * (_RMS_NORM + 2 if tower.rms_norms else 1 + 3 * mergers)
    of_tower = PATCHES * (tower.values + blocks) if trains_tower else 0
    return float(tokens * (of_tower + aligner) * item)


def bytes_of_block(tower: VisionTower, tokens: int, item: int = 2) -> float:
    """Return what one block needs: when backward recomputes it, or in a forward pass that keeps nothing."""
    return float(tokens * PATCHES * _numbers_of_block(tower) * item)


def bytes_of_rows(tower: VisionTower, images: ImageTokens, frozen: bool, item: int = 2) -> float:
    """Return the bytes of rows: those a frozen vision tower keeps for a rollout, and those that layers add."""
    kept = images.of_rollout * (1 + tower.deepstack) if frozen else 0
    added = images.shown * tower.deepstack
    return float((kept + added) * tower.rows * item)


def _numbers_of_block(tower: VisionTower) -> int:
    norm = _RMS_NORM if tower.rms_norms else _LAYER_NORM
    attention = _ATTENTION - tower.shuffles  # where the kernel's output needs no copy
    return (attention + 2 * norm) * tower.hidden + tower.feed_forward * tower.ffn
