"""Images of a micro batch of n packed tokens: the tokens that stand for them, and the positions of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swift_megatron_grpo.packing.segments import PackedLayout
from swift_megatron_grpo.types import ModelFrames, ModelImage, ModelRecording, PlacedImage, Sample, SoundPart

SEEN, HEARD = 1, 2
Shown = ModelImage | ModelRecording | SoundPart


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images and recordings of a micro batch. Their files are read by the first pipeline stage."""

    shown: tuple[Shown, ...]  # in the order of their tokens; once for each segment that shows it
    mask: torch.Tensor  # [1, n] SEEN for tokens that stand for a part of an image, HEARD for those of a recording, or 0


def pack_images(samples: Sequence[Sample], layout: PackedLayout) -> tuple[tuple[Shown, ...], torch.Tensor]:
    """Return the images and recordings of a packed micro batch, and the mask [n] of their tokens."""
    mask = torch.zeros(layout.total, dtype=torch.uint8)
    shown: list[Shown] = []
    for segment in layout.segments:
        for placed in samples[segment.sample].images:
            if segment.begin <= placed.start < segment.end:
                begin = segment.start + placed.start - segment.begin
                kind = SEEN if isinstance(placed.image, ModelImage) else HEARD
                mask[begin : begin + placed.image.num_tokens] = kind
                shown.append(placed.image)
    return tuple(shown), mask


def positions_of(length: int, images: Sequence[PlacedImage]) -> torch.Tensor:
    """Return the positions [3, length] of a sequence in time, height and width, for a rotary embedding of three axes.

    Text counts on along all axes together. The tokens of an image lie on a grid that begins at the next position, and
    the text after it continues behind the longest side, time included as in vLLM; transformers leaves out time. Frames
    and sound of a video that has both begin together, and each continues at its own pace. Images behind the sequence's
    end are ignored.
    """
    pieces: list[torch.Tensor] = []
    done = following = begun = 0  # tokens, the position of the next one, and that of the last video with sound
    for placed in images:
        if placed.start >= length:
            break
        if isinstance(placed.image, ModelRecording):
            continue  # it has positions like text
        text = placed.start - done
        pieces.append(_text(following, text))
        following += text
        done = placed.start + placed.image.num_tokens
        if isinstance(placed.image, SoundPart):
            first = begun + placed.image.lead
            pieces.append(_text(first, placed.image.num_tokens))
            following = max(following, first + placed.image.num_tokens)
            continue
        time, height, width = placed.image.token_grid
        step, lead = (placed.image.step, placed.image.lead) if isinstance(placed.image, ModelFrames) else (1, None)
        if lead is not None:
            begun = following if lead == 0 else begun
            axes = torch.tensor([lead]), torch.arange(height), torch.arange(width)
            pieces.append(_grid(axes) + begun)
            following = max(following, begun + max(lead + 1, height, width))
            continue
        times = (torch.arange(time, dtype=torch.float64) * step).long()  # of pairs of frames, rounded as in vLLM
        axes = times, torch.arange(height), torch.arange(width)
        pieces.append(_grid(axes) + following)
        following += max(int(times[-1]) + 1, height, width)
    pieces.append(_text(following, length - done))
    return torch.cat(pieces, dim=1)


def _grid(axes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return [3, tokens] of three axes, the last of which counts fastest."""
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])


def _text(first: int, length: int) -> torch.Tensor:
    return torch.arange(first, first + length).expand(3, -1)
