"""Images of prompts, as the trainer takes them: one object per image, shared by all completions that show it.

The tokens of a sequence come from the engine, which has expanded each image to its placeholders. The grid of an image
follows from the size in its file's header; its pixels are cut by ms-swift's template and the model's own processor, and
only when a tower needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import groupby
from math import sqrt
from typing import Any
from weakref import WeakValueDictionary

import torch
from PIL import Image
from swift.template import Template

from swift_megatron_grpo.images.files import digest_of, image_bytes, image_size, images_of
from swift_megatron_grpo.types import Picture, Placed

MERGE = 2  # a token stands for so many patches in height and in width
_RESIZING = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # of a row's chat_template_kwargs


class MismatchedImages(ValueError):
    """The placeholders of a prompt are not those of its images."""


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """The way in which a model's processor cuts images, and the token that stands for a part of one."""

    placeholder: int
    patch: int  # pixels per side of a patch
    channels: tuple[tuple[float, float], ...]
    max_pixels: int | None  # --max_pixels, which ms-swift applies before the processor's own limits

    @classmethod
    def of_template(cls, template: Template) -> ImageFormat:
        processor = template.processor.image_processor
        if processor.merge_size != MERGE or processor.temporal_patch_size != 2:
            raise ValueError(
                f"the image processor merges {processor.merge_size} x {processor.merge_size} patches of "
                f"{processor.temporal_patch_size} frames; only 2 x 2 patches of 2 frames are supported"
            )
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = (0.0,) * 3, (1.0,) * 3
        if processor.do_normalize:
            mean, std = processor.image_mean, processor.image_std
        channels = tuple((factor / s, -m / s) for m, s in zip(mean, std, strict=True))
        return cls(template.processor.image_token_id, processor.patch_size, channels, template.max_pixels)

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the patches, in time, height and width, of an image of this size. `options`: of the row."""
        if self.max_pixels and width * height > self.max_pixels:
            ratio = width / height
            scaled = sqrt(self.max_pixels / ratio)
            width, height = int(scaled * ratio), int(scaled)
        factor = self.patch * MERGE
        if "resized_height" in options and "resized_width" in options:
            height, width = options["resized_height"], options["resized_width"]
            options = {}
        from qwen_vl_utils.vision_process import smart_resize  # needed for images only

        rows, columns = smart_resize(height, width, factor, options.get("min_pixels"), options.get("max_pixels"))
        return 1, rows // self.patch, columns // self.patch


class PictureReader:
    """Reads the images of prompts."""

    def __init__(self, template: Template) -> None:
        self.format = ImageFormat.of_template(template)
        self._template = copy(template)
        self._template.max_length = None
        self._template.set_mode("vllm")  # as for the engine
        self._shared: WeakValueDictionary[tuple[Any, ...], Picture] = WeakValueDictionary()

    @property
    def token_side(self) -> int:
        """Pixels per side of the square that is one token."""
        return self.format.patch * MERGE

    def pictures(self, row: Mapping[str, Any]) -> list[Picture]:
        """Return the pictures of a row, in order. Equal files that are still in use are one object."""
        options = {k: v for k, v in (row.get("chat_template_kwargs") or {}).items() if k in _RESIZING}
        return [self._picture(image_bytes(source), options) for source in images_of(row)]

    def exact(self, content: bytes) -> Picture:
        """Return the picture of an image that is cut as it is: its sides are multiples of those of a token."""
        width, height = image_size(content)
        grid = (1, height // self.format.patch, width // self.format.patch)

        def encode() -> torch.Tensor:
            with Image.open(BytesIO(content)) as image:
                return self._cut(image.convert("RGB"), grid)

        return Picture(digest_of(content), grid, MERGE, self.format.channels, encode)

    def place(
        self, prompt_id: str, pictures: Sequence[Picture], tokens: Sequence[int], may_end_early: bool = False
    ) -> tuple[Placed, ...]:
        """Return where the images of a prompt are in a sequence of tokens, as the engine has expanded them.

        `may_end_early`: of a conversation that may have ended before its last images were shown.
        """
        runs = placeholder_runs(tokens, self.format.placeholder)
        pictures = pictures[: len(runs)] if may_end_early else pictures
        found, expected = [length for _, length in runs], [picture.num_tokens for picture in pictures]
        if found != expected:
            raise MismatchedImages(
                f"prompt {prompt_id}: the engine has expanded its images to {found} tokens, and the trainer to "
                f"{expected}; use the same --model, --template and --max_pixels on both sides; a scheduler that adds "
                "images must return all of them as rollout_infos['images']"
            )
        return tuple(Placed(picture, start) for picture, (start, _) in zip(pictures, runs, strict=True))

    def expand(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Repeat the placeholder of each picture in a prompt that is not expanded yet, as engines do."""
        waiting = iter(pictures)
        expanded: list[int] = []
        for token in tokens:
            expanded += [token] * (next(waiting).num_tokens if token == self.format.placeholder else 1)
        return expanded

    def encode_prompt(self, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a row's prompt, with one placeholder per image."""
        tokens: list[int] = self._template.encode(dict(row))["input_ids"]
        return tokens

    def _picture(self, content: bytes, options: Mapping[str, Any]) -> Picture:
        digest = digest_of(content)
        key = (digest, *sorted(options.items()))
        picture = self._shared.get(key)
        if picture is None:
            grid = self.format.grid(*image_size(content), options)
            encode = partial(self._patches, content, dict(options), grid)
            picture = Picture(digest, grid, MERGE, self.format.channels, encode)
            self._shared[key] = picture
        return picture

    def _patches(self, content: bytes, options: dict[str, Any], grid: tuple[int, int, int]) -> torch.Tensor:
        """Decode, resize and cut an image; the values stay bytes, a quarter of what the processor would return."""
        row = {
            "messages": [{"role": "user", "content": "<image>"}],
            "images": [{"bytes": content, "path": None}],
            "chat_template_kwargs": options,
        }
        [image] = self._template.encode(row)["images"]
        return self._cut(image, grid)

    def _cut(self, image: Image.Image, grid: tuple[int, int, int]) -> torch.Tensor:
        cut = self._template.processor.image_processor(
            images=[image], do_resize=False, do_rescale=False, do_normalize=False, return_tensors="pt"
        )
        found = tuple(cut["image_grid_thw"][0].tolist())
        if found != grid:
            raise MismatchedImages(f"an image is cut into {found} patches, and its size promises {grid}")
        patches: torch.Tensor = cut["pixel_values"]
        return patches


def placeholder_runs(tokens: Sequence[int], placeholder: int) -> list[tuple[int, int]]:
    """Return the start and the length of every run of placeholders."""
    runs, start = [], 0
    for is_placeholder, run in groupby(tokens, key=placeholder.__eq__):
        length = sum(1 for _ in run)
        if is_placeholder:
            runs.append((start, length))
        start += length
    return runs
