"""Images of prompts as the trainer reads them: one object per image, shared by all completions that show it.

The tokens of a sequence come from the inference engine, which has expanded each image to its placeholders. The grid of
an image follows from the size in its file's header; ms-swift's template and the model's own processor cut its pixels,
once a vision tower needs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import groupby
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from PIL import Image
from swift.template import Template

from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.data.image_formats import MERGE, Grid, MismatchedImages, image_format, placeholder_of
from swift_megatron_grpo.data.images import digest_of, files_of, image_bytes, image_size, images_of
from swift_megatron_grpo.data.recordings import (
    UnreadableRecording,
    as_heard,
    recording_bytes,
    recording_format,
    recordings_of,
)
from swift_megatron_grpo.data.videos import (
    UnreadableVideo,
    as_shown,
    frames_of,
    options_of,
    plays_sound,
    video_bytes,
    video_format,
    videos_of,
)
from swift_megatron_grpo.types import ModelFrames, ModelImage, ModelRecording, PlacedImage, Prompt, SoundPart

Medium = ModelImage | ModelFrames | ModelRecording | SoundPart
_HEARD, _WATCHED = (ModelRecording, SoundPart), (ModelFrames, SoundPart)
M = TypeVar("M", bound=Medium)

_RESIZING = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # of a row's chat_template_kwargs


class ImageReader:
    """Reads the images of prompts."""

    def __init__(self, template: Template) -> None:
        self.format = image_format(template)
        self.videos = video_format(template)
        self.recordings = recording_format(template.processor)
        self.plays_sound = plays_sound(template)  # of videos
        self._template = encoder_of(template)
        self._shared: WeakValueDictionary[tuple[Any, ...], Medium] = WeakValueDictionary()

    def images(self, row: Mapping[str, Any]) -> list[Medium]:
        """Return the images, then videos and recordings of a row. Equal files that are still in use are one object."""
        recordings = map(as_heard, map(recording_bytes, recordings_of(row)))
        images = self.read(row, map(image_bytes, images_of(row)))
        return [*images, *self.frames_of(row), *map(self.recording, recordings)]

    def frames_of(self, row: Mapping[str, Any]) -> list[ModelFrames | SoundPart]:
        """Return the frames of the videos of a row, and the parts of their sound."""
        return [frames for source in videos_of(row) for frames in self.frames(video_bytes(source), options_of(row))]

    def recording(self, heard: bytes) -> ModelRecording:
        """Return a recording, of the file that engines are sent."""
        if self.recordings is None:
            raise UnreadableRecording("is for a model that takes no recordings")
        key = ("heard", digest_of(heard))
        recording = self._shared.get(key)
        if not isinstance(recording, ModelRecording):
            recording = self._shared[key] = self.recordings.read(heard)
        return recording

    def read(self, row: Mapping[str, Any], contents: Iterable[bytes]) -> list[ModelImage]:
        """Return the images of a row from the contents of its files."""
        options = {k: v for k, v in (row.get("chat_template_kwargs") or {}).items() if k in _RESIZING}
        return [self._image(content, options) for content in contents]

    def exact(self, content: bytes) -> ModelImage:
        """Return an image that is cut without being resized: its size is the format's small_size."""
        grid = self.format.uncut_grid(*image_size(content))

        def encode() -> torch.Tensor:
            with Image.open(BytesIO(content)) as image:
                return self._cut(image.convert("RGB"), grid, resize=False)

        return self._make(content, grid, encode)

    def place(
        self, prompt_id: str, images: Sequence[Medium], tokens: Sequence[int], may_end_early: bool = False
    ) -> tuple[PlacedImage, ...]:
        """Return where images and recordings are in expanded tokens, in the order of the tokens.

        `may_end_early`: the last ones may not have been shown.
        """
        placed: list[PlacedImage] = []
        kinds: list[tuple[str, int, Sequence[Medium]]] = [
            ("images", self.format.placeholder, _only(ModelImage, images))
        ]
        if self.videos is not None:
            kinds.append(("videos", self.videos.placeholder, _only(ModelFrames, images)))
        if self.recordings is not None:
            heard = [medium for medium in images if isinstance(medium, _HEARD)]
            kinds.append(("recordings", self.recordings.placeholder, heard))
        for name, placeholder, of_kind in kinds:
            runs = placeholder_runs(tokens, placeholder)
            found = _filled(runs, of_kind)
            if found is None or not (len(found) == len(of_kind) or may_end_early):
                raise MismatchedImages(
                    f"prompt {prompt_id}: the engine has expanded its {name} to {[length for _, length in runs]} "
                    f"tokens, and the trainer to {[medium.num_tokens for medium in of_kind]}; use the same --model, "
                    "--template and --max_pixels on both sides; a scheduler that adds images must return all of them "
                    "as rollout_infos['images']"
                )
            placed += found
        return tuple(sorted(placed, key=lambda each: each.start))

    def expand(self, tokens: Sequence[int], images: Sequence[Medium]) -> list[int]:
        """Repeat the placeholders of media in a prompt that is not expanded yet, as engines do."""
        seen, heard = iter(_only(ModelImage, images)), iter(_only(ModelRecording, images))
        frames = iter([medium for medium in images if isinstance(medium, _WATCHED)])
        expanded: list[int] = []
        for token in tokens:
            if token == self.format.placeholder:
                expanded += self.format.tokens_of(next(seen))
            elif self.videos is not None and token == self.videos.placeholder:
                for shown in frames:
                    expanded += self.videos.tokens_of(shown)
                    if shown.ends:
                        break
            elif self.recordings is not None and token == self.recordings.placeholder:
                expanded += [token] * next(heard).num_tokens
            else:
                expanded.append(token)
        return expanded

    def length_of(self, medium: Medium) -> int:
        """Return the number of tokens that replace a placeholder."""
        if isinstance(medium, _WATCHED):
            assert self.videos is not None
            return len(self.videos.tokens_of(medium))
        return self.format.length_of(medium) if isinstance(medium, ModelImage) else medium.num_tokens

    def encode_prompt(self, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a row's prompt, with one placeholder per image."""
        tokens: list[int] = self._template.encode(dict(row))["input_ids"]
        return tokens

    def placeholder_in_text(self, kind: str, content: bytes) -> list[int]:
        """Return the placeholder of an image, video or audio and its neighbours in a prompt, its start and end."""
        prompt = self.encode_prompt(_row_of(kind, content))
        place = prompt.index(placeholder_of(kind, self._template.processor))
        return prompt[place - 1 : place + 2]

    def frames(self, content: bytes, options: Mapping[str, Any]) -> list[ModelFrames | SoundPart]:
        """Return the frames of a video, and the parts of its sound, from its file.

        Frames are decoded once a vision tower needs them.
        """
        if self.videos is None:
            raise UnreadableVideo("is for a model that takes no videos")
        digest = digest_of(content)
        shown = partial(as_shown, self._template, content, options)
        chosen = frames_of(self._template, content, options)
        frames = self.videos.read(chosen, digest, shown, self.recording(chosen.sound) if chosen.sound else None)
        key = (digest, *sorted(options.items()))
        shared = [self._shared.setdefault((*key, place), each) for place, each in enumerate(frames)]
        return [each for each in shared if isinstance(each, _WATCHED)]

    def _image(self, content: bytes, options: Mapping[str, Any]) -> ModelImage:
        key = (digest_of(content), *sorted(options.items()))
        image = self._shared.get(key)
        if not isinstance(image, ModelImage):
            grid = self.format.grid(*image_size(content), options)
            image = self._make(content, grid, partial(self._patches, content, dict(options), grid))
            self._shared[key] = image
        return image

    def _make(self, content: bytes, grid: Grid, encode: Callable[[], torch.Tensor]) -> ModelImage:
        made = self.format
        return ModelImage(digest_of(content), grid, MERGE, made.channels, encode, has_axes=made.has_axes)

    def _patches(self, content: bytes, options: dict[str, Any], grid: Grid) -> torch.Tensor:
        """Decode, resize and cut an image; the values stay bytes, a quarter of what the processor would return."""
        [image] = self._template.encode({**_row_of("image", content), "chat_template_kwargs": options})["images"]
        return self._cut(image, grid, resize=True)

    def _cut(self, image: Image.Image, grid: Grid, resize: bool) -> torch.Tensor:
        patches, found = self.format.cut(image, resize)
        if found != grid:
            raise MismatchedImages(f"an image is cut into {found} patches, and its size promises {grid}")
        return patches


def _only(kind: type[M], media: Iterable[Medium]) -> list[M]:
    """Return the media of a kind. Frames of a video are not among the images."""
    return [medium for medium in media if type(medium) is kind]


def _filled(runs: Sequence[tuple[int, int]], media: Sequence[Medium]) -> list[PlacedImage] | None:
    """Return the media that stand for these runs of placeholders, in order; None: their numbers of tokens differ.

    A run is one medium. Frames of a video with sound may touch, and so may parts of its sound.
    """
    placed: list[PlacedImage] = []
    for start, length in runs:
        end = start + length
        while start < end and len(placed) < len(media):
            medium = media[len(placed)]
            touches = isinstance(medium, SoundPart) or (isinstance(medium, ModelFrames) and medium.lead is not None)
            if start + medium.num_tokens > end or not (touches or start + medium.num_tokens == end):
                return None
            placed.append(PlacedImage(medium, start))
            start += medium.num_tokens
        if start < end:
            return None
    return placed


def _row_of(kind: str, content: bytes) -> dict[str, Any]:
    """Return a row with one medium."""
    medium = {"bytes": content, "path": None} if kind == "image" else content
    return {"messages": [{"role": "user", "content": f"<{kind}>"}], f"{kind}s": [medium]}


def placeholder_runs(tokens: Sequence[int], placeholder: int) -> list[tuple[int, int]]:
    """Return the start and the length of every run of placeholders."""
    runs = []
    start = 0
    for is_placeholder, run in groupby(tokens, key=placeholder.__eq__):
        length = sum(1 for _ in run)
        if is_placeholder:
            runs.append((start, length))
        start += length
    return runs


def media_digests(prompt: Prompt) -> list[str]:
    """Return the digests of the files of a prompt's images, videos and recordings."""
    images = [digest for digest, _ in files_of(prompt.row)]
    videos = [digest_of(video_bytes(source)) for source in videos_of(prompt.row)]
    return [*images, *videos, *(digest_of(recording_bytes(source)) for source in recordings_of(prompt.row))]
