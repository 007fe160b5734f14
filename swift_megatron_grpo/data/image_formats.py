"""The ways in which processors cut images, and the tokens that stand for them: both follow from an image's size."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt, sqrt
from typing import Any, ClassVar

import torch
from PIL import Image
from swift.template import Template

from swift_megatron_grpo.types import ModelImage

MERGE = 2  # a token stands for so many patches in height and in width
Grid = tuple[int, int, int]  # of patches, in time (or by tile), height and width
_AS_BYTES = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}


class MismatchedImages(ValueError):
    """The placeholders of a prompt, or the patches of an image, are not those that follow from its size."""


def channels_of(processor: Any) -> tuple[tuple[float, float], ...]:
    """Return a, b of each colour: the model reads a * byte + b."""
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    mean = processor.image_mean if processor.do_normalize else (0.0,) * 3
    std = processor.image_std if processor.do_normalize else (1.0,) * 3
    return tuple((factor / s, -m / s) for m, s in zip(mean, std, strict=True))


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """The way in which a model's processor cuts images, and the token that stands for a part of one."""

    processor: Any  # transformers' image processor
    placeholder: int
    max_pixels: int | None  # --max_pixels, which ms-swift applies before the processor's own limits
    before: tuple[int, ...] = ()  # tokens that inference engines put in front of an image's tokens
    after: tuple[int, ...] = ()  # and behind them
    channels: tuple[tuple[float, float], ...] = field(init=False)
    has_axes: ClassVar[bool] = True  # False: the tokens of an image have positions like text

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", channels_of(self.processor))

    @property
    def small_size(self) -> tuple[int, int]:
        """Return width and height of an image of few tokens that no processor resizes."""
        raise NotImplementedError

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> Grid:
        """Return the patches of an image of this size. `options`: of the row."""
        raise NotImplementedError

    def uncut_grid(self, width: int, height: int) -> Grid:
        """Return the patches of an image whose size is a multiple of small_size."""
        raise NotImplementedError

    def cut(self, image: Image.Image, resize: bool) -> tuple[torch.Tensor, Grid]:
        """Return the bytes [patches, values of a patch] of an image as the template leaves it, and its grid."""
        raise NotImplementedError

    def tokens_of(self, image: ModelImage) -> list[int]:
        """Return the tokens with which inference engines replace the placeholder of an image."""
        return [*self.before, *[self.placeholder] * image.num_tokens, *self.after]

    def length_of(self, image: ModelImage) -> int:
        """Return the number of these tokens."""
        return len(self.before) + image.num_tokens + len(self.after)

    def limited(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the size to which ms-swift shrinks an image for --max_pixels, or for the row's own limit."""
        limit = options.get("max_pixels", self.max_pixels)
        if not limit or width * height <= limit:
            return width, height
        scaled = sqrt(limit / (width / height))
        return int(scaled * (width / height)), int(scaled)


@dataclass(frozen=True, slots=True)
class Patches(ImageFormat):
    """Patches of an image that ms-swift's template has resized (Qwen-VL)."""

    processor_resizes: ClassVar[bool] = False

    @property
    def side(self) -> int:
        """Pixels per side of the square that is one token."""
        return int(self.processor.patch_size) * MERGE

    @property
    def small_size(self) -> tuple[int, int]:
        return 4 * self.side, 2 * self.side

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> Grid:
        width, height = self.limited(width, height, {})  # the row's own limit is one of Qwen's resizer
        if "resized_height" in options and "resized_width" in options:
            height = options["resized_height"]
            width = options["resized_width"]
            options = {}
        limits = options.get("min_pixels"), options.get("max_pixels")
        rows, columns = self.resizer()(height, width, self.side, *limits)
        return self.uncut_grid(columns, rows)

    @staticmethod
    def resizer() -> Any:
        """Return the function with which the template computes the size; its package is needed for images only."""
        from qwen_vl_utils.vision_process import smart_resize

        return smart_resize

    def uncut_grid(self, width: int, height: int) -> Grid:
        return 1, height // self.processor.patch_size, width // self.processor.patch_size

    def cut(self, image: Image.Image, resize: bool) -> tuple[torch.Tensor, Grid]:
        found = self.processor(images=[image], do_resize=resize and self.processor_resizes, **_AS_BYTES)
        time, height, width = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (time, height, width)


@dataclass(frozen=True, slots=True)
class OmniPatches(Patches):
    """The same, where the template resizes with the package of Qwen-Omni."""

    @staticmethod
    def resizer() -> Any:
        from qwen_omni_utils import vision_process

        return vision_process.smart_resize


@dataclass(frozen=True, slots=True)
class ResizedPatches(Patches):
    """Patches of an image that the processor itself resizes (GLM-V). Of a row's options, max_pixels alone counts."""

    processor_resizes: ClassVar[bool] = True

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> Grid:
        from transformers.models.glm4v.image_processing_glm4v import smart_resize

        width, height = self.limited(width, height, options)
        limits = self.processor.size
        frames = self.processor.temporal_patch_size
        rows, columns = smart_resize(
            frames, height, width, frames, self.side, limits["shortest_edge"], limits["longest_edge"]
        )
        return self.uncut_grid(columns, rows)


@dataclass(frozen=True, slots=True)
class Tiles(ImageFormat):
    """Tiles of one size, each seen by itself, and with several also the whole image as one of them (InternVL)."""

    has_axes: ClassVar[bool] = False
    of_tile: tuple[int, int] = (0, 0)  # patches in height and in width

    @property
    def small_size(self) -> tuple[int, int]:
        return int(self.processor.size["width"]), int(self.processor.size["height"])

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> Grid:
        return self.uncut_grid(*self.limited(width, height, options))

    def uncut_grid(self, width: int, height: int) -> Grid:
        tiles = self.processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return int(tiles), *self.of_tile

    def cut(self, image: Image.Image, resize: bool) -> tuple[torch.Tensor, Grid]:
        found = self.processor(images=[image], crop_to_patches=True, **_AS_BYTES)["pixel_values"]
        return found.flatten(1), (len(found), *self.of_tile)


def placeholder_of(kind: str, processor: Any) -> int:
    """Return the token that stands for a part of a medium, which not every processor has as a number.

    `kind`: image, video or audio.
    """
    return int(processor.tokenizer.convert_tokens_to_ids(getattr(processor, f"{kind}_token")))


def placeholder_texts(processor: Any) -> list[str]:
    """Return how the tokens are written that stand for parts of images, videos and audio."""
    return [text for name, text in vars(processor).items() if name in ("image_token", "video_token", "audio_token")]


def image_format(template: Template) -> ImageFormat:
    """Return the way in which the processor of this template cuts images."""
    processor = template.processor
    images = processor.image_processor
    name = type(images).__name__
    placeholder = placeholder_of("image", processor)
    if name.startswith("GotOcr2"):
        side = isqrt(processor.image_seq_length) * MERGE
        ends = (processor.start_image_token_id,), (processor.end_image_token_id,)
        return Tiles(images, placeholder, template.max_pixels, *ends, of_tile=(side, side))
    merge, frames = images.merge_size, images.temporal_patch_size
    if (merge, frames) != (MERGE, 2):
        raise ValueError(
            f"the image processor merges {merge} x {merge} patches of {frames} frames; only 2 x 2 patches of 2 frames "
            "are supported"
        )
    kind: type[Patches] = ResizedPatches if name.startswith(("Glm4v", "Glm46V")) else Patches
    if type(processor).__name__.startswith("Qwen3Omni"):
        kind = OmniPatches
    return kind(images, placeholder, template.max_pixels)
