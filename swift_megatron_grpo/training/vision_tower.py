"""Composite models: a language model, and a vision tower that embeds images for it.

mcore-bridge builds them as a wrapper with `language_model` and, on the first pipeline stage, `visual`. A guard stands
between a micro batch and the vision tower:

* The vision tower embeds each image of a micro batch once, however many completions show it.
* A frozen vision tower embeds an image once: its rows are kept for as long as any sample shows the image.
* The audio part of a Qwen-Omni does the same with recordings.
* A policy may sample the token that stands for a part of an image. There it is a word, and vLLM embeds it as one.
* Images are read, cut and normalised here, so only on ranks that embed them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from mcore_bridge.model import GPTModel, MultimodalGPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from swift_megatron_grpo.packing.images import HEARD, SEEN, PackedImages
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.types import ModelImage, ModelRecording, SoundPart

# Rows of images, [tokens, h], and what deepstack adds to each of the language model's first layers, [tokens, h] each.
Rows = tuple[torch.Tensor, ...]
Medium = TypeVar("Medium", ModelImage, ModelRecording)


def is_composite(model: torch.nn.Module) -> bool:
    return isinstance(model, MultimodalGPTModel)


def language_model(model: torch.nn.Module) -> GPTModel:
    """Return the part that computes hidden states and log-probs; for a text model, the model itself."""
    return model.language_model if isinstance(model, MultimodalGPTModel) else model


def thinker_config(config: Any) -> Any:
    """Return the part of transformers' config that describes language model and towers; Qwen-Omni nests it."""
    return config.thinker_config if hasattr(config, "thinker_config") else config


def freeze_parts_without_rows(models: Iterable[torch.nn.Module], media: Collection[str]) -> None:
    """Freeze the image or the audio part of a model if rows have media of the other alone.

    Otherwise weight decay would change a part that nothing trains. `media`: image, video, audio: that rows have.
    """
    for model in models:
        towers: Any = model.visual if is_composite(model) else None
        if towers is not None and media and hasattr(towers, "audio_tower"):
            if "audio" not in media:
                towers.audio_tower.requires_grad_(False)
            elif list(media) == ["audio"]:
                towers.visual.requires_grad_(False)


def guard_vision_towers(models: Iterable[torch.nn.Module]) -> None:
    for model in models:
        towers: Any = model.visual if is_composite(model) else None
        if towers is not None and not towers.config.language_model_only:  # then the wrapper is empty
            towers.get_inputs_embeds = VisionTowerGuard(towers).embed


class VisionTowerGuard:
    """Replaces `get_inputs_embeds` of one vision tower, and of the audio part next to it."""

    def __init__(self, towers: Any) -> None:
        self._towers = towers  # mcore-bridge's wrapper around the vision tower of transformers
        self._cuts_tiles = not hasattr(towers, "visual")  # InternVL, whose vision tower has a separate aligner
        self._hears = hasattr(towers, "audio_tower")
        self._upstream = towers.get_inputs_embeds
        hearing = set(towers.audio_tower.parameters()) if self._hears else set()
        self._trains_hearing = any(parameter.requires_grad for parameter in hearing)
        self._trains_seeing = any(parameter.requires_grad for parameter in {*towers.parameters()} - hearing)
        config = towers.config
        self._cuts_sequence = config.sequence_parallel and config.tensor_model_parallel_size > 1
        self._kept: WeakKeyDictionary[ModelImage | ModelRecording, Rows] = WeakKeyDictionary()

    def embed(
        self,
        inputs_embeds: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        packed_images: PackedImages | None = None,
        **others: Any,
    ) -> Any:
        """Return the embeddings [1, n, h] with images in them, or what else mcore-bridge's own method returns.

        Upstream embeds a blank image, and a blank recording, where there are none, and adds 0 times the results, so
        that every trained weight has a gradient. A part that needs none is not run.
        """
        towers, learns = self._towers, torch.is_grad_enabled()
        trains_seeing, trains_hearing = self._trains_seeing and learns, self._trains_hearing and learns
        if packed_images is None and not (trains_seeing or trains_hearing):
            return towers.get_inputs_embeds_language_model(inputs_embeds, input_ids=input_ids, **others)
        shown = () if packed_images is None else packed_images.shown
        images = [image for image in shown if isinstance(image, ModelImage)]
        recordings = [each for each in shown if isinstance(each, ModelRecording | SoundPart)]
        marks = input_ids
        if packed_images is not None:  # to upstream, only tokens of these are placeholders; sampled ones are words
            config = thinker_config(towers.hf_config)
            marks = torch.where(packed_images.mask == SEEN, config.image_token_id, 0)
            if recordings:
                marks = torch.where(packed_images.mask == HEARD, config.audio_token_id, marks)
        nothing = inputs_embeds.new_zeros(0)  # in place of pixels, grids and features: the rows are there
        blank = torch.zeros(1, 1, device=torch.cuda.current_device())  # in place of the rows of a blank one
        given: dict[str, torch.Tensor] = {}
        with ExitStack() as replacements:
            if images or not trains_seeing:
                row, *deep = self._rows_of(images, self._see, self._trains_seeing) if images else (blank,)
                output = SimpleNamespace(pooler_output=row, deepstack_features=deep)  # with the names of transformers
                seeing = (towers, "get_image_features") if self._cuts_tiles else (towers.visual, "forward")
                replacements.enter_context(replaced(*seeing, lambda *pixels, **others: output))
                given |= {"pixel_values": nothing, "image_grid_thw": nothing} if images else {}
            if recordings or (self._hears and not trains_hearing):
                heard = self._rows_of_recordings(recordings) if recordings else blank
                replacements.enter_context(replaced(towers, "get_audio_features", lambda *features: heard))
                given |= {"input_features": nothing} if recordings else {}
            return self._upstream(inputs_embeds, input_ids=marks, **given, **others)

    def _rows_of(
        self, shown: Sequence[Medium], compute: Callable[[Sequence[Medium]], list[Rows]], trained: bool
    ) -> Rows:
        """Return the rows of images or recordings, in order; those that occur several times are computed once."""
        distinct = list(dict.fromkeys(shown))
        known = {medium: self._kept[medium] for medium in distinct if medium in self._kept}
        missing = [medium for medium in distinct if medium not in known]
        if missing:
            with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                computed = dict(zip(missing, compute(missing), strict=True))
            known |= computed
            if not trained:
                self._kept.update(computed.items())
        return tuple(torch.cat(parts) for parts in zip(*(known[medium] for medium in shown), strict=True))

    def _rows_of_recordings(self, shown: Sequence[ModelRecording | SoundPart]) -> torch.Tensor:
        """Return the rows [tokens, h] of recordings, and of parts of a video's sound, which is embedded as a whole."""
        whole = [each.sound if isinstance(each, SoundPart) else each for each in shown]
        [rows] = self._rows_of(whole, self._hear, self._trains_hearing)
        of_each = zip(shown, rows.split([each.num_tokens for each in whole]), strict=True)
        return torch.cat([each.rows(found) if isinstance(each, SoundPart) else found for each, found in of_each])

    def _hear(self, recordings: Sequence[ModelRecording]) -> list[Rows]:
        return [(self._rows_of_recording(recording),) for recording in recordings]

    def _rows_of_recording(self, recording: ModelRecording) -> torch.Tensor:
        towers = self._towers
        features = recording.encode().to(torch.cuda.current_device(), towers.audio_tower.dtype)[None]
        frames = torch.ones(features.shape[::2], dtype=torch.bool, device=features.device)
        rows: torch.Tensor = towers.get_audio_features(features, frames).last_hidden_state
        if len(rows) != recording.num_tokens:
            raise ValueError(f"a recording has {len(rows)} rows for its {recording.num_tokens} tokens")
        return rows

    def _see(self, images: Sequence[ModelImage]) -> list[Rows]:
        sizes = [image.num_tokens for image in images]
        row, *deep = self._rows_of_images(images)
        if self._cuts_sequence:
            # Upstream takes this rank's part of these rows, and Megatron averages the gradients over the ranks.
            deep = [copy_to_tensor_model_parallel_region(rows) for rows in deep]
        return list(zip(*(rows.split(sizes) for rows in (row, *deep)), strict=True))

    def _rows_of_images(self, images: Sequence[ModelImage]) -> Rows:
        towers = self._towers
        device = torch.device(torch.cuda.current_device())
        pixels = torch.cat([_normalised(image, device) for image in images])  # [patches or tiles, values of one]
        grids = torch.tensor([image.grid for image in images], device=device)
        if not self._cuts_tiles:
            output = towers.visual(pixels.to(towers.visual.dtype), grid_thw=grids)
            deep = output.deepstack_features if "deepstack_features" in output else None
            return output.pooler_output, *(deep or ())
        config = towers.hf_config
        shape = (config.vision_config.num_channels, *config.vision_config.image_size)
        output = towers.get_image_features(
            pixels.to(towers.vision_tower.dtype).unflatten(1, shape),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return (output.pooler_output.flatten(0, 1),)


def _normalised(image: ModelImage, device: torch.device) -> torch.Tensor:
    """Return the values [patches or tiles, values of one] that the vision tower reads."""
    pixels = image.encode()
    if device.type == "cuda":
        pixels = pixels.pin_memory()
    pixels = pixels.to(device, non_blocking=True)
    channels = torch.tensor(image.channels, device=device)
    factor, offset = channels.repeat_interleave(pixels.shape[1] // len(channels), dim=0).unbind(1)
    return pixels.float() * factor + offset
