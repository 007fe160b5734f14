"""Composite models: a language model, and a vision tower that embeds images for it.

mcore-bridge builds them as a wrapper with `language_model` and, on the first pipeline stage, `visual`. A guard stands
between a micro batch and the vision tower:

* The vision tower embeds each image of a micro batch once, however many completions show it.
* A frozen vision tower embeds an image once: its rows are kept for as long as any sample shows the image.
* A policy may sample the token that stands for a part of an image. There it is a word, and vLLM embeds it as one.
* Images are read, cut and normalised here, so only on ranks that embed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from mcore_bridge.model import GPTModel, MultimodalGPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from swift_megatron_grpo.packing.images import PackedImages
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.types import ModelImage


def is_composite(model: torch.nn.Module) -> bool:
    return isinstance(model, MultimodalGPTModel)


def language_model(model: torch.nn.Module) -> GPTModel:
    """Return the part that computes hidden states and log-probs; for a text model, the model itself."""
    return model.language_model if isinstance(model, MultimodalGPTModel) else model


def guard_vision_towers(models: Iterable[torch.nn.Module], frozen: bool) -> None:
    """Put a guard in front of every vision tower. `frozen`: no weight is trained, whatever its own marks say."""
    for model in models:
        towers: Any = model.visual if is_composite(model) else None
        if towers is not None:
            trained = not frozen and any(parameter.requires_grad for parameter in towers.parameters())
            towers.get_inputs_embeds = VisionTowerGuard(towers, trained).embed


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that a vision tower computes for images, one per token. The names are transformers'."""

    pooler_output: torch.Tensor  # [tokens, h]
    deepstack_features: list[torch.Tensor]  # of each of the first layers of the language model [tokens, h]

    def split(self, sizes: Sequence[int]) -> list[_Rows]:
        deep = [feature.split(sizes) for feature in self.deepstack_features]
        parts = self.pooler_output.split(sizes)
        return [_Rows(part, [feature[i] for feature in deep]) for i, part in enumerate(parts)]

    @classmethod
    def join(cls, parts: Sequence[_Rows]) -> _Rows:
        deep = zip(*(part.deepstack_features for part in parts), strict=True)
        return cls(torch.cat([part.pooler_output for part in parts]), [torch.cat(features) for features in deep])


class _PatchVisionTower:
    """A vision tower that reads patches of images of any size, and their grids."""

    def __init__(self, towers: Any) -> None:
        self._tower = towers.visual  # a module of transformers

    def compute(self, pixels: torch.Tensor, grids: torch.Tensor) -> _Rows:
        """Return the rows of images, in order. `pixels`: [patches, values of a patch] of all."""
        output = self._tower(pixels.to(self._tower.dtype), grid_thw=grids)
        deep = output.deepstack_features if "deepstack_features" in output else None
        return _Rows(output.pooler_output, list(deep or []))

    def returning(self, rows: _Rows) -> AbstractContextManager[None]:
        """Make calls of the vision tower return these rows inside the context."""
        return replaced(self._tower, "forward", lambda *pixels, **others: rows)


class _TileVisionTower:
    """A vision tower with a separate aligner, which reads tiles of one size (InternVL)."""

    def __init__(self, towers: Any) -> None:
        self._towers = towers
        config = towers.hf_config
        self._shape = (config.vision_config.num_channels, *config.vision_config.image_size)
        self._options = {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def compute(self, pixels: torch.Tensor, grids: torch.Tensor) -> _Rows:
        """Return the rows of images, in order. `pixels`: [tiles, values of a tile] of all."""
        tiles = pixels.to(self._towers.vision_tower.dtype).unflatten(1, self._shape)
        output = self._towers.get_image_features(tiles, **self._options)
        return _Rows(output.pooler_output.flatten(0, 1), [])

    def returning(self, rows: _Rows) -> AbstractContextManager[None]:
        """Make calls of the vision tower and its aligner return these rows inside the context."""
        return replaced(self._towers, "get_image_features", lambda *pixels, **others: rows)


class VisionTowerGuard:
    """Replaces `get_inputs_embeds` of one vision tower."""

    def __init__(self, towers: Any, trained: bool) -> None:
        self._towers = towers  # mcore-bridge's wrapper around the vision tower of transformers
        self._tower = _PatchVisionTower(towers) if hasattr(towers, "visual") else _TileVisionTower(towers)
        self._upstream = towers.get_inputs_embeds
        self._trained = trained
        config = towers.config
        self._cuts_sequence = config.sequence_parallel and config.tensor_model_parallel_size > 1
        self._kept: WeakKeyDictionary[ModelImage, _Rows] = WeakKeyDictionary()

    def embed(
        self,
        inputs_embeds: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        packed_images: PackedImages | None = None,
        **others: Any,
    ) -> Any:
        """Return the embeddings [1, n, h] with images in them, or what else mcore-bridge's own method returns."""
        towers = self._towers
        if packed_images is None:
            # Upstream embeds a blank image and adds 0 times the result, so that every trained weight has a gradient.
            embed = (
                self._upstream if self._trained and torch.is_grad_enabled() else towers.get_inputs_embeds_language_model
            )
            return embed(inputs_embeds, input_ids=input_ids, **others)
        # To upstream, only tokens of these images are placeholders; sampled ones are embedded as words already.
        marks = torch.where(packed_images.mask, towers.hf_config.image_token_id, 0)
        nothing = inputs_embeds.new_zeros(0)  # in place of pixels and grids: the rows are there
        with self._tower.returning(self._rows_of(packed_images.shown)):
            return self._upstream(
                inputs_embeds, input_ids=marks, pixel_values=nothing, image_grid_thw=nothing, **others
            )

    def _rows_of(self, shown: Sequence[ModelImage]) -> _Rows:
        """Return the rows of images, in order; those that occur several times are computed once."""
        distinct = list(dict.fromkeys(shown))
        known = {image: self._kept[image] for image in distinct if image in self._kept}
        missing = [image for image in distinct if image not in known]
        if missing:
            computed = self._compute(missing).split([image.num_tokens for image in missing])
            known |= zip(missing, computed, strict=True)
            if not self._trained:
                self._kept.update(zip(missing, computed, strict=True))
        rows = _Rows.join([known[image] for image in shown])
        if not self._cuts_sequence:
            return rows
        # Upstream takes this rank's part of these rows, and Megatron averages the gradients over the ranks.
        return _Rows(rows.pooler_output, [copy_to_tensor_model_parallel_region(row) for row in rows.deepstack_features])

    def _compute(self, images: Sequence[ModelImage]) -> _Rows:
        device = torch.device(torch.cuda.current_device())
        pixels = torch.cat([_normalised(image, device) for image in images])
        grids = torch.tensor([image.grid for image in images], device=device)
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()):
            return self._tower.compute(pixels, grids)


def _normalised(image: ModelImage, device: torch.device) -> torch.Tensor:
    """Return the values [patches or tiles, values of one] that the vision tower reads."""
    pixels = image.encode()
    if device.type == "cuda":
        pixels = pixels.pin_memory()
    pixels = pixels.to(device, non_blocking=True)
    factor, offset = (
        torch.tensor(image.channels, device=device)
        .repeat_interleave(pixels.shape[1] // len(image.channels), dim=0)
        .unbind(1)
    )
    return pixels.float() * factor + offset
