"""Videos of rows: their files, the limits on them, and the frames that engine and trainer see.

A row has paths, URLs, base64 or bytes of MP4, MOV, MKV, WebM and AVI files. The trainer alone decodes them, once their
headers are within the limits, and ms-swift's template chooses and resizes frames. Engines are sent the result: a header
with the times of the frames, which promises the length of the pixels behind it, so no decoder reads a stranger's file.
A Qwen-Omni may also hear a video: its sound follows the pixels, as recordings are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from io import BytesIO
from itertools import chain
from struct import Struct
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from swift.template import Template

from swift_megatron_grpo.data.image_formats import MERGE, channels_of, placeholder_of
from swift_megatron_grpo.data.images import file_bytes
from swift_megatron_grpo.data.recordings import FRAME, RATE, check_heard, samples_of, wav_of, with_silence
from swift_megatron_grpo.data.recordings import SECONDS as SECONDS_OF_SOUND
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.types import ModelFrames, ModelRecording, SoundPart

SECONDS = 600
BYTES = 2**28  # of a file
DECODED_BYTES = 2**30  # of the chosen frames, before they are resized
SENT_BYTES = 2**26  # of the frames that engines are sent
FRAMES = (2, 768)  # that a model sees; ms-swift's most
OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")  # of a row
_PAIR = 2  # frames that become one patch in time
MAGIC = b"FRAMES1\n"
_HEADER = Struct("<8sIIIId")  # magic, frames, height, width, frames of the file, frames of the file per second
_NUMBER = np.dtype("<u4")  # of a frame in the file
# how files begin, at a byte, and the demuxers of ffmpeg that read them: none opens another file or an address
_CONTAINERS = ((4, b"ftyp", "mov"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))
_ONE_AT_A_TIME = Lock()


class UnreadableVideo(ValueError):
    """An element of a row's column `videos` is not a video that can be trained."""


def videos_of(row: Mapping[str, Any]) -> list[Any]:
    return list(row.get("videos") or [])


def options_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row says about the choice and the size of frames."""
    return {name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if name in OPTIONS}


def video_bytes(source: Any) -> bytes:
    """Return the file of a video."""
    return file_bytes(source, UnreadableVideo)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a video that are shown: where they are in it, and their size."""

    numbers: tuple[int, ...]  # of the frames in the file
    total: int  # frames of the file
    rate: float  # of them per second
    height: int
    width: int
    sound: bytes = b""  # as recordings are heard; empty: it is not

    @property
    def times(self) -> list[float]:
        """Return the time in seconds of each pair, between its frames."""
        seconds = [number / self.rate for number in self.numbers]
        return [(first + second) / 2 for first, second in zip(seconds[::_PAIR], seconds[1::_PAIR], strict=True)]

    @property
    def seconds_of_pair(self) -> float:
        """Return the distance of pairs, rounded as the engine rounds it."""
        return float(np.float32(_PAIR / (len(self.numbers) / self.total * self.rate)))

    @property
    def pixel_bytes(self) -> int:
        return 3 * len(self.numbers) * self.height * self.width

    def file_of(self, pixels: np.ndarray) -> bytes:
        """Return what engines are sent. `pixels`: [frames, colours, height, width] bytes."""
        header = _HEADER.pack(MAGIC, len(self.numbers), self.height, self.width, self.total, self.rate)
        return header + np.array(self.numbers, _NUMBER).tobytes() + pixels.tobytes() + self.sound

    @staticmethod
    def of_file(content: bytes) -> Frames:
        """Return the frames of such a file. Raises ValueError for any other; nothing is decoded for that."""
        if len(content) < _HEADER.size or not content.startswith(MAGIC):
            raise ValueError("must be the frames of a video, as the trainer sends them")
        _, count, height, width, total, rate = _HEADER.unpack_from(content)
        numbers_end = _HEADER.size + count * _NUMBER.itemsize
        pixels_end = numbers_end + 3 * count * height * width
        if len(content) > SENT_BYTES or pixels_end > len(content):
            raise ValueError(f"must have the pixels that its header promises, in at most {SENT_BYTES} bytes")
        if sound := content[pixels_end:]:
            check_heard(sound)
        numbers = np.frombuffer(content[_HEADER.size : numbers_end], _NUMBER).tolist()
        in_order = numbers == sorted(numbers) and max(numbers, default=0) < total
        if not (FRAMES[0] <= count <= FRAMES[1] and count % _PAIR == 0 and min(height, width) > 0 and in_order):
            raise ValueError(f"must have an even number of {FRAMES[0]} to {FRAMES[1]} frames in the order of the video")
        if not (math.isfinite(rate) and rate > 0 and total / rate <= SECONDS):
            raise ValueError(f"must be of a video of at most {SECONDS} s")
        return Frames(tuple(numbers), total, rate, height, width, sound)


def pixels_of(shown: bytes) -> torch.Tensor:
    """Return the pixels [frames, colours, height, width] of what engines are sent."""
    frames = Frames.of_file(shown)
    begin = len(shown) - len(frames.sound) - frames.pixel_bytes
    pixels = np.frombuffer(shown, np.uint8, count=frames.pixel_bytes, offset=begin)
    return torch.from_numpy(pixels.reshape(-1, 3, frames.height, frames.width).copy())


def for_engine(shown: bytes) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return pixels and description as vLLM takes them."""
    frames = Frames.of_file(shown)
    return pixels_of(shown), {
        "fps": frames.rate, "frames_indices": list(frames.numbers), "total_num_frames": frames.total,
        "duration": frames.total / frames.rate, "video_backend": "pyav", "do_sample_frames": False,
    }  # fmt: skip


# ---- sampling, in the trainer


def sample_once(template: Template) -> None:
    """Have a template show the frames that the trainer has chosen, in place of choosing its own."""
    template.replace_tag = partial(_replace_tag, template)


def _replace_tag(template: Template, media_type: str, index: int, inputs: Any) -> Any:
    if media_type != "video":
        return type(template).replace_tag(template, media_type, index, inputs)
    [shown] = shown_videos(template, {**vars(inputs), "videos": [inputs.videos[index]]})
    inputs.videos[index] = for_engine(shown)
    inputs.mm_processor_kwargs |= {"do_resize": False, "do_sample_frames": False}
    if sound := Frames.of_file(shown).sound:
        if not hears(template):
            raise UnreadableVideo("has sound, which this model does not hear")
        inputs.audios.insert(inputs.audio_idx, (samples_of(sound), RATE))
        inputs.audio_idx += 1
        inputs.mm_processor_kwargs["use_audio_in_video"] = True
    return ["<|vision_start|><|video_pad|><|vision_end|>"]


def as_shown(template: Template, content: bytes, options: Mapping[str, Any]) -> bytes:
    """Return what engine and trainer see of a file. Raises UnreadableVideo for one outside of the limits."""
    return content if content.startswith(MAGIC) else _as_shown(template, content, tuple(sorted(options.items())))


@lru_cache(maxsize=2)  # a vision tower asks for the pairs of frames of a video one after the other
def _as_shown(template: Template, content: bytes, options: tuple[tuple[str, Any], ...]) -> bytes:
    with _refusing():
        file = _read_header(content)
        numbers = _choose(template, file, dict(options))
        frames, pixels = _resize(template, file, numbers, dict(options), _decode(content, file, numbers))
        return replace(frames, sound=_sound_of(template, file, content)).file_of(pixels.numpy())


def frames_of(template: Template, content: bytes, options: Mapping[str, Any]) -> Frames:
    """Return which frames of a file are shown, without decoding one."""
    if content.startswith(MAGIC):
        return Frames.of_file(content)
    with _refusing():
        file = _read_header(content)
        numbers = _choose(template, file, options)
        blank = torch.empty(len(numbers), 3, file.height, file.width, dtype=torch.uint8, device="meta")
        frames, _ = _resize(template, file, numbers, options, blank)
        return replace(frames, sound=_sound_of(template, file, content))


class _Header(NamedTuple):
    """The sizes of a video, which its file states."""

    demuxer: str
    rate: float
    total: int
    height: int
    width: int


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except UnreadableVideo:
        raise
    except Exception as error:  # of ffmpeg, or of the template: too few frames, sides too different
        raise UnreadableVideo(f"cannot be shown: {error}") from error


def _read_header(content: bytes) -> _Header:
    import av  # needed for videos only

    if len(content) > BYTES:
        raise UnreadableVideo(f"has {len(content)} bytes; at most {BYTES} can be trained")
    found = (demuxer for place, begin, demuxer in _CONTAINERS if content.startswith(begin, place))
    demuxer = next(found, None)
    if demuxer is None:
        raise UnreadableVideo(f"begins with {content[:12]!r} and is none of MP4, MOV, MKV, WebM and AVI; convert it")
    with av.open(BytesIO(content), "r", format=demuxer) as file:
        if not file.streams.video:
            raise UnreadableVideo("has no pictures")
        stream = file.streams.video[0]
        rate = float(stream.average_rate or 0)
        total = sum(packet.size > 0 for packet in file.demux(stream))
        height, width = stream.codec_context.height, stream.codec_context.width
    if not rate or total / rate > SECONDS:
        raise UnreadableVideo(f"has {total / rate if rate else math.inf:g} seconds; at most {SECONDS} can be trained")
    return _Header(demuxer, rate, total, height, width)


def _choose(template: Template, file: _Header, options: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the frames that are shown."""
    count: int = _package_of(template).smart_nframes(dict(options), total_frames=file.total, video_fps=file.rate)
    if 3 * count * file.width * file.height > DECODED_BYTES:
        raise UnreadableVideo(
            f"shows {count} frames of {file.width} x {file.height} pixels; at most {DECODED_BYTES} bytes can be "
            "decoded: use a smaller fps or max_frames in the row's chat_template_kwargs"
        )
    numbers: list[int] = torch.linspace(0, file.total - 1, count).round().long().tolist()
    return numbers


def _decode(content: bytes, file: _Header, numbers: Sequence[int]) -> torch.Tensor:
    """Return these frames [frames, colours, height, width]."""
    import av

    chosen, wanted = [], set(numbers)
    with av.open(BytesIO(content), "r", format=file.demuxer) as opened:
        for number, frame in enumerate(opened.decode(video=0)):
            if number in wanted:
                chosen.append(frame.to_ndarray(format="rgb24"))
            if number == numbers[-1]:
                break
    if len(chosen) != len(numbers) or any(frame.shape[:2] != (file.height, file.width) for frame in chosen):
        raise UnreadableVideo(f"is cut off or damaged: {len(chosen)} of {len(numbers)} frames can be read")
    return torch.from_numpy(np.stack(chosen)).permute(0, 3, 1, 2)


def hears(template: Template) -> bool:
    return type(template.processor).__name__.startswith("Qwen3Omni")


def plays_sound(template: Template) -> bool:
    """Return True if ms-swift's environment variable USE_AUDIO_IN_VIDEO lets a Qwen3-Omni hear its videos."""
    return hears(template) and bool(template.use_audio_in_video)


def _sound_of(template: Template, file: _Header, content: bytes) -> bytes:
    """Return the sound of a video as recordings are heard; empty if this run does not play it."""
    return _decode_sound(content, file.demuxer) if plays_sound(template) else b""


@lru_cache(maxsize=16)
def _decode_sound(content: bytes, demuxer: str) -> bytes:
    import av

    least, most = (int(RATE * seconds) for seconds in SECONDS_OF_SOUND)
    samples, number = [np.zeros(0, "<i2")], 0
    with av.open(BytesIO(content), "r", format=demuxer) as opened:
        if not opened.streams.audio:
            raise UnreadableVideo("has no sound, and the environment variable USE_AUDIO_IN_VIDEO is set; unset it")
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        for frame in chain(opened.decode(audio=0), [None]):
            for piece in resampler.resample(frame):
                samples.append(piece.to_ndarray()[0])
                number += len(samples[-1])
            if number > most:
                break
    if not least <= number <= most:
        limits = f"{SECONDS_OF_SOUND[0]} to {SECONDS_OF_SOUND[1]}"
        raise UnreadableVideo(f"has {number / RATE:g} seconds of sound or more; {limits} can be trained")
    return wav_of(with_silence(np.concatenate(samples)[: number // FRAME * FRAME].astype("<i2")))


def _resize(
    template: Template, file: _Header, numbers: list[int], options: Mapping[str, Any], pixels: torch.Tensor
) -> tuple[Frames, torch.Tensor]:
    """Return the frames as ms-swift's template resizes them."""
    about = {"fps": file.rate, "frames_indices": numbers, "total_num_frames": file.total, "video_backend": "pyav"}
    read = pixels, about, len(numbers) / file.total * file.rate
    inputs = SimpleNamespace(videos=["a video"], chat_template_kwargs=dict(options), mm_processor_kwargs={})
    package, silent = _package_of(template), copy(template)
    silent.use_audio_in_video = False  # here is no file whose sound it could read
    with (
        _ONE_AT_A_TIME,  # engines encode prompts in several threads
        replaced(package, "VIDEO_READER_BACKENDS", {"torchvision": lambda _: read}),
        replaced(package, "get_video_reader_backend", lambda: "torchvision"),
    ):
        type(template).replace_tag(silent, "video", 0, inputs)
    [seen] = inputs.videos
    resized = (seen[0] if isinstance(seen, tuple) else seen).to(torch.uint8)
    frames = Frames(tuple(numbers), file.total, file.rate, *resized.shape[2:])
    if frames.pixel_bytes > SENT_BYTES - 2**14 or len(numbers) > FRAMES[1]:
        raise UnreadableVideo(
            f"is shown as {len(numbers)} frames of {frames.width} x {frames.height} pixels; at most {SENT_BYTES} bytes "
            f"and {FRAMES[1]} frames can be trained: use a smaller fps, max_frames or max_pixels in the row's "
            "chat_template_kwargs"
        )
    return frames, resized


def _package_of(template: Template) -> ModuleType:
    """Return the module of Qwen's package with which a template chooses and resizes frames."""
    return import_module("qwen_omni_utils.v2_5.vision_process" if hears(template) else "qwen_vl_utils.vision_process")


# ---- what a model reads


class SoundTokens(NamedTuple):
    """The tokens around a video that is heard, and the one that stands for a part of its sound."""

    start: int
    end: int
    placeholder: int


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """The way in which a model's processor cuts frames, and the tokens that stand for a video (Qwen-VL)."""

    processor: Any  # transformers' video processor
    tokenizer: Any
    start: int  # tokens that mark the start and the end of an image
    end: int
    placeholder: int
    positions_per_second: float
    seconds_of_pair: float | None  # that the engine takes for the distance of pairs; None: what their times say
    writes_times: bool  # each pair of frames stands alone, behind a text with its time
    sound: SoundTokens | None = None  # of a video that is heard as well; None: none is

    def read(
        self, frames: Frames, digest: str, shown: Callable[[], bytes], sound: ModelRecording | None = None
    ) -> list[ModelFrames | SoundPart]:
        """Return a video as one object, or as one for each pair of frames. `shown`: decodes what engines are sent.

        The `sound` stands between the pairs, a part behind each pair that it reaches.
        """
        height, width = (side // self.processor.patch_size for side in (frames.height, frames.width))
        times = frames.times
        if sound is not None:
            assert self.seconds_of_pair is not None
            step = self.seconds_of_pair * self.positions_per_second
            leads = [int(step * pair) for pair in range(len(times))]
            return self._with_sound(digest, (height, width), shown, leads, sound)
        if not self.writes_times:
            step = (self.seconds_of_pair or frames.seconds_of_pair) * self.positions_per_second
            return [self._make(digest, (len(times), height, width), shown, 0, step=step)]
        last = len(times) - 1
        return [
            self._make(digest, (1, height, width), shown, pair, time=time, ends=pair == last)
            for pair, time in enumerate(times)
        ]

    def _with_sound(
        self, digest: str, sides: tuple[int, int], shown: Callable[[], bytes], leads: list[int], sound: ModelRecording
    ) -> list[ModelFrames | SoundPart]:
        """Return pairs of frames and parts of the sound in the order of their positions. `leads`: those of pairs."""
        parts: list[ModelFrames | SoundPart] = []
        for pair, (lead, following) in enumerate(zip(leads, [*leads[1:], sound.num_tokens], strict=True)):
            begin, end = min(lead, sound.num_tokens), min(following, sound.num_tokens)
            is_last = pair == len(leads) - 1
            ends = is_last and begin == end
            parts.append(self._make(digest, (1, *sides), shown, pair, lead=lead, ends=ends))
            if begin < end:
                parts.append(SoundPart(sound, begin, end - begin, ends=is_last))
        return parts

    def _make(
        self, digest: str, grid: tuple[int, int, int], shown: Callable[[], bytes], pair: int, **others: Any
    ) -> ModelFrames:
        encode = partial(self._cut, shown, _PAIR * pair, grid)
        return ModelFrames(digest, grid, MERGE, channels_of(self.processor), encode, **others)

    def _cut(self, shown: Callable[[], bytes], first: int, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return the bytes [patches, values of a patch] of so many pairs of frames, from this frame on."""
        found = self.processor(
            videos=[pixels_of(shown())[first : first + _PAIR * grid[0]]], do_resize=False, do_sample_frames=False,
            do_rescale=False, do_normalize=False, return_tensors="pt",
        )  # fmt: skip
        assert tuple(found["video_grid_thw"][0].tolist()) == grid
        patches: torch.Tensor = found["pixel_values_videos"]
        return patches

    def tokens_of(self, frames: ModelFrames | SoundPart) -> list[int]:
        """Return the tokens with which engines show these frames, or play this part of the sound."""
        if frames.lead is not None:
            assert self.sound is not None
            placeholder = self.sound.placeholder if isinstance(frames, SoundPart) else self.placeholder
            before = [self.sound.start] if isinstance(frames, ModelFrames) and frames.lead == 0 else []
            after = [self.sound.end] if frames.ends else []
            return [*before, *[placeholder] * frames.num_tokens, *after]
        assert isinstance(frames, ModelFrames)
        shown = [self.placeholder] * frames.num_tokens
        if frames.time is None:
            return shown
        written = self.tokenizer.encode(f"<{frames.time:.1f} seconds>", add_special_tokens=False)
        return [*written, self.start, *shown, self.end]


def video_format(template: Template) -> VideoFormat | None:
    """Return the way in which the processor of a template cuts videos; None: rows with videos are refused."""
    processor = template.processor
    kind = type(processor).__name__
    if not kind.startswith(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3Omni")):
        return None
    per_second, seconds_of_pair = 1.0, (None if kind.startswith("Qwen2_5_VL") else 1.0)
    if kind.startswith("Qwen2_5_VL"):
        per_second = template.config.vision_config.tokens_per_second
    elif kind.startswith("Qwen3Omni"):
        # vLLM 0.32 reads second_per_grid_ts, which this processor calls otherwise, and falls back to these seconds.
        per_second, seconds_of_pair = template.config.thinker_config.position_id_per_seconds, 2.0
    start, end = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    sound = None
    if kind.startswith("Qwen3Omni"):
        texts = [processor.audio_bos_token, processor.audio_eos_token, processor.audio_token]
        sound = SoundTokens(*processor.tokenizer.convert_tokens_to_ids(texts))
    return VideoFormat(
        processor.video_processor, processor.tokenizer, start, end, placeholder_of("video", processor), per_second,
        seconds_of_pair, writes_times=kind.startswith("Qwen3VL"), sound=sound,
    )  # fmt: skip


def shown_videos(template: Template, row: Mapping[str, Any]) -> list[bytes]:
    """Return what engine and trainer see of the videos of a row, in order."""
    return [as_shown(template, video_bytes(source), options_of(row)) for source in videos_of(row)]
