"""Videos of rows: limits by their headers, the frames that are chosen, and what engines are sent of them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from qwen_vl_utils import vision_process
from swift.model import get_processor
from swift.template import Template, get_template

from swift_megatron_grpo.cli.check_layouts.layouts import template_for_images
from swift_megatron_grpo.cli.tiny_models import TINY, Shape, save_composite
from swift_megatron_grpo.data import videos
from swift_megatron_grpo.data.encoded_rows import check_row
from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.data.recordings import wav_of
from swift_megatron_grpo.data.videos import (
    Frames,
    UnreadableVideo,
    as_shown,
    frames_of,
    pixels_of,
    shown_videos,
    video_bytes,
)
from swift_megatron_grpo.packing.images import positions_of
from tests.support.videos import add_sound

SMALL = {"min_pixels": 32 * 32, "max_pixels": 64 * 64}


def encoded(frames: int = 12, rate: int = 4, codec: str = "ffv1", container: str = "matroska") -> bytes:
    """Return a video of grey frames, each brighter than the one before, of 96 x 64 pixels; ffv1 loses nothing."""
    file = BytesIO()
    with av.open(file, "w", format=container) as writer:
        stream = writer.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "bgr0" if codec == "ffv1" else "yuv420p"
        for number in range(frames):
            pixels = np.full((64, 96, 3), 2 * number % 256, dtype=np.uint8)
            writer.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        writer.mux(stream.encode())
    return file.getvalue()


def shown(count: int = 4, height: int = 32, width: int = 64, total: int = 8, rate: float = 4.0) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    return Frames(tuple(range(0, total, total // count))[:count], total, rate, height, width).file_of(pixels)


def header(*values: float) -> bytes:
    return struct.pack("<8sIIIId", b"FRAMES1\n", *values)


GOOD = shown()
HOSTILE = {
    "an MP4": encoded(codec="mpeg4", container="mp4"),
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "a path": b"/etc/passwd",
    "an address": b"http://127.0.0.1/video.mp4",
    "a playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "nothing": b"",
    "a header alone": GOOD[:36],
    "half a header": GOOD[:20],
    "a pixel less": GOOD[:-1],
    "a pixel more": GOOD + b"\0",
    "half a sound": GOOD + wav_of(np.zeros(16_000, "<i2"))[:-2],
    "a sound of 31 seconds": GOOD + wav_of(np.zeros(31 * 16_000, "<i2")),
    "a promise of terabytes": header(768, 2**31, 2**31, 768, 2.0) + bytes(1000),
    "a promise of more than 32 bits": header(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2.0) + bytes(1000),
    "no frames": header(0, 32, 32, 8, 2.0),
    "no height": header(2, 0, 32, 8, 2.0) + bytes(8),
    "three frames": header(3, 2, 2, 8, 2.0) + struct.pack("<3I", 0, 1, 2) + bytes(36),
    "more frames than a model sees": header(770, 1, 1, 770, 100.0) + bytes(4 * 770 + 3 * 770),
    "frames in another order": header(2, 2, 2, 8, 2.0) + struct.pack("<2I", 5, 1) + bytes(24),
    "frames behind the end": header(2, 2, 2, 8, 2.0) + struct.pack("<2I", 1, 8) + bytes(24),
    "10 hours": header(2, 2, 2, 36_000, 1.0) + struct.pack("<2I", 0, 1) + bytes(24),
    "a rate of 0": header(2, 2, 2, 8, 0.0) + struct.pack("<2I", 0, 1) + bytes(24),
    "a rate of no number": header(2, 2, 2, 8, float("nan")) + struct.pack("<2I", 0, 1) + bytes(24),
    "an infinite rate": header(2, 2, 2, 8, float("inf")) + struct.pack("<2I", 0, 1) + bytes(24),
    "a negative rate": header(2, 2, 2, 8, -2.0) + struct.pack("<2I", 0, 1) + bytes(24),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Template]:
    made = {}
    for kind in ("qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_omni_moe"):
        folder = tmp_path_factory.mktemp(kind)
        save_composite(folder, Shape(kind, TINY))
        made[kind] = get_template(
            get_processor(str(folder), model_type=kind), template_type=template_for_images(kind), max_length=64
        )
    return made


def row(*sources: Any, **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "<video>" * len(sources) + "?"}
    return {"messages": [message], "videos": list(sources), "chat_template_kwargs": SMALL | options}


@pytest.mark.parametrize(("options", "numbers"), [({}, [0, 2, 4, 7, 9, 11]), ({"nframes": 2}, [0, 11]),
                                                  ({"fps": 4.0, "max_frames": 4}, [0, 4, 7, 11])])  # fmt: skip
def test_frames_are_chosen_as_by_the_template(
    templates: Mapping[str, Template], options: dict[str, Any], numbers: list[int]
) -> None:
    """A frame's brightness is its number: 3 seconds at 4 frames per second, of which 2 are shown by default."""
    [sent] = shown_videos(templates["qwen2_5_vl"], row(encoded(), **options))
    frames = Frames.of_file(sent)
    assert (list(frames.numbers), frames.total, frames.rate) == (numbers, 12, 4.0)
    assert pixels_of(sent)[:, 0, 0, 0].tolist() == [2 * number for number in numbers]
    assert frames.times == [(a + b) / 8 for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    assert frames.file_of(pixels_of(sent).numpy()) == sent and frames.seconds_of_pair == pytest.approx(
        2 * 3 / len(numbers)
    )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("codec", "container"), [("mpeg4", "mp4"), ("mpeg4", "avi"), ("ffv1", "matroska")])
def test_engine_and_trainer_see_the_same_frames(
    templates: Mapping[str, Template], kind: str, codec: str, container: str
) -> None:
    """The engine may have the row's file, or the frames that the trainer sends: the template shows it the same."""
    content, reader = encoded(codec=codec, container=container), ImageReader(templates[kind])
    [sent] = shown_videos(templates[kind], row(content))
    encoder = encoder_of(templates[kind])
    for source in (content, base64.b64encode(sent).decode(), {"bytes": content, "path": None}):
        [(pixels, about)] = encoder.encode(row(source))["videos"]
        assert torch.equal(pixels, pixels_of(sent))
        assert about["frames_indices"] == list(Frames.of_file(sent).numbers)
    media = reader.images(row(content))
    processor = templates[kind].processor.video_processor
    expected = processor(videos=[pixels], do_resize=False, do_sample_frames=False, return_tensors="pt")
    assert sum(part.grid[0] for part in media) == expected["video_grid_thw"][0, 0]
    patches = torch.cat([part.encode() for part in media])
    assert patches.dtype == torch.uint8
    factor, offset = torch.tensor(media[0].channels).repeat_interleave(patches.shape[1] // 3, dim=0).unbind(1)
    assert (patches * factor + offset - expected["pixel_values_videos"]).abs().max() < 5e-7
    assert frames_of(templates[kind], content, SMALL) == Frames.of_file(sent)
    again = reader.images(row(content))
    assert all(a is b for a, b in zip(media, again, strict=True))  # one object, however often it is read


def test_nothing_is_decoded_before_a_vision_tower_asks(
    templates: Mapping[str, Template], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and times follow from the header. All pairs of frames of a video are decoded at once."""
    decoded: list[int] = []
    decode = videos._decode
    monkeypatch.setattr(videos, "_decode", lambda *given: decoded.append(1) or decode(*given))
    parts = ImageReader(templates["qwen3_vl"]).images(row(encoded(frames=22), encoded(frames=23)))
    assert len(parts) == 10 and not decoded
    for part in parts:
        part.encode()
    assert len(decoded) == 2


def test_prompts_may_be_encoded_in_several_threads(templates: Mapping[str, Template]) -> None:
    """Engines do so; qwen-vl-utils has its own readers again afterwards."""
    before = vision_process.VIDEO_READER_BACKENDS
    encoder = encoder_of(templates["qwen2_5_vl"])
    rows = [row(encoded(frames=20 + number % 5, rate=3 + number)) for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        found = [inputs["videos"][0][1] for inputs in threads.map(encoder.encode, rows)]
    assert [about["fps"] for about in found] == [3 + number for number in range(16)]
    assert vision_process.VIDEO_READER_BACKENDS is before


def test_each_pair_has_its_time_in_the_text(templates: Mapping[str, Template]) -> None:
    """vLLM writes it so for a Qwen3-VL, between the marks of start and end that the template has written."""
    reader = ImageReader(templates["qwen3_vl"])
    media = reader.images(row(encoded(), encoded(frames=8)))
    tokens = reader.expand(reader.encode_prompt(row(encoded(), encoded(frames=8))), media)
    text = templates["qwen3_vl"].tokenizer.decode(tokens)
    pad = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    first, second = (
        "".join(f"<{time} seconds>{pad}" for time in times) for times in (("0.2", "1.4", "2.5"), ("0.2", "1.5"))
    )
    assert f"<|vision_start|>{first}<|vision_end|><|vision_start|>{second}<|vision_end|>?" in text
    assert [placed.image for placed in reader.place("0-0", media, tokens)] == media
    placeholders = 2  # which a dry run and --max_length take off
    unexpanded = reader.encode_prompt(row(encoded(), encoded(frames=8)))
    assert len(tokens) == len(unexpanded) - placeholders + sum(map(reader.length_of, media))


@pytest.fixture
def hearing(templates: Mapping[str, Template], monkeypatch: pytest.MonkeyPatch) -> Template:
    """Return the template of a Qwen3-Omni with USE_AUDIO_IN_VIDEO."""
    monkeypatch.setattr(templates["qwen3_omni_moe"], "use_audio_in_video", True)
    return templates["qwen3_omni_moe"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.5, [("video", 12), ("audio", 13), ("video", 12), ("video", 12)]),
        (5.5, [("video", 12), ("audio", 50), ("video", 12), ("audio", 22), ("video", 12)]),
        (10, [("video", 12), ("audio", 50), ("video", 12), ("audio", 50), ("video", 12), ("audio", 30)]),
    ],
)
def test_the_sound_of_a_video_stands_between_its_frames(
    hearing: Template, tmp_path: Path, seconds: float, expected: list[tuple[str, int]]
) -> None:
    """vLLM places pairs of frames 2 seconds apart, here as far as 50 tokens of sound."""
    path, reader = tmp_path / "a.mp4", ImageReader(hearing)
    path.write_bytes(encoded(codec="mpeg4", container="mp4"))
    add_sound(path, seconds, seed=0)
    media = reader.images(row(str(path)))
    tokens = reader.expand(reader.encode_prompt(row(str(path))), media)
    per_second = hearing.config.thinker_config.position_id_per_seconds
    assert 2 * per_second == 50
    pad = {kind: f"<|{kind}_pad|>" for kind in ("video", "audio")}
    size = {"video": media[0].num_tokens / 12, "audio": 1}
    between = "".join(pad[kind] * int(count * size[kind]) for kind, count in expected)
    text = hearing.tokenizer.decode(tokens)
    assert f"<|vision_start|><|audio_start|>{between}<|audio_end|><|vision_end|>?" in text
    placed = reader.place("0-0", media, tokens)
    assert [each.image for each in placed] == media
    positions = positions_of(len(tokens), placed)
    begun = placed[0].start
    heard = [
        place
        for each in placed
        if each.image.has_axes is False
        for place in range(each.start, each.start + each.image.num_tokens)
    ]
    assert positions[:, heard].tolist() == [[begun + i for i in range(len(heard))]] * 3
    watched = [int(positions[0, each.start]) - begun for each in placed if each.image.has_axes]
    assert watched == [0, 50, 100]
    behind = begun + max(101, len(heard))
    assert (
        positions[:, -1].tolist() == [behind + len(tokens) - 1 - (placed[-1].start + placed[-1].image.num_tokens)] * 3
    )
    [sent] = shown_videos(hearing, row(str(path)))
    inputs = encoder_of(hearing).encode(row(base64.b64encode(sent).decode()))
    [(samples, rate)] = inputs["audios"]
    assert rate == 16_000 and wav_of((samples * 2**15).astype("<i2")) == Frames.of_file(sent).sound


def test_videos_whose_sound_cannot_be_heard_are_refused(hearing: Template, tmp_path: Path) -> None:
    path, reader = tmp_path / "a.mp4", ImageReader(hearing)
    path.write_bytes(encoded(codec="mpeg4", container="mp4"))
    assert "has no sound" in str(check_row(row(str(path)), reader, []).problem)
    for seconds in (0.05, 31):
        add_sound(path, seconds, seed=0)
        assert "0.1 to 30 can be trained" in str(check_row(row(str(path)), reader, []).problem)
    add_sound(path, 1, seed=0)
    found = check_row(row(str(path)), reader, [])
    assert (found.problem, found.videos, found.recordings) == (None, 1, 1)
    audio = {"audios": [wav_of(np.zeros(16_000, "<i2"))]}
    assert "recordings and videos with sound" in str(check_row(row(str(path)) | audio, reader, []).problem)


def test_a_model_that_does_not_hear_is_shown_no_sound(templates: Mapping[str, Template]) -> None:
    sent = base64.b64encode(GOOD + wav_of(np.zeros(16_000, "<i2"))).decode()
    with pytest.raises(UnreadableVideo, match="which this model does not hear"):
        encoder_of(templates["qwen2_5_vl"]).encode(row(sent))


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_only_the_form_of_the_trainer_is_taken_for_frames(content: bytes) -> None:
    with pytest.raises(ValueError, match="must "):
        Frames.of_file(content)


def test_files_beyond_the_limits_are_refused(
    templates: Mapping[str, Template], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(content: Any, **options: Any) -> str:
        with pytest.raises(UnreadableVideo) as raised:
            as_shown(templates["qwen2_5_vl"], video_bytes(content), SMALL | options)
        return str(raised.value)

    good = encoded()
    assert "and is none of MP4, MOV" in problem(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
    assert "has 1201 seconds; at most 600" in problem(encoded(frames=1201, rate=1, codec="mpeg4", container="avi"))
    assert "cannot be shown" in problem(good[:200])
    assert "cannot be shown" in problem(encoded(codec="mpeg4", container="mp4")[:-500])
    damaged = bytearray(encoded(frames=18))
    damaged[len(damaged) // 2 :] = bytes(byte ^ 255 for byte in damaged[len(damaged) // 2 :])
    assert "cannot be shown" in problem(bytes(damaged), nframes=18)
    assert "cannot be shown: nframes should" in problem(encoded(frames=1))
    assert "cannot be read: " in problem(str(tmp_path / "missing.mp4"))
    assert problem(3).startswith("is int, neither")
    monkeypatch.setattr(videos, "DECODED_BYTES", 3 * 6 * 96 * 64 - 1)
    assert "shows 6 frames of 96 x 64 pixels; at most" in problem(good)
    monkeypatch.undo()
    monkeypatch.setattr(videos, "SENT_BYTES", 2**14 + 100)
    assert "use a smaller fps, max_frames or max_pixels" in problem(encoded(frames=16))
    monkeypatch.setattr(videos, "BYTES", 100)
    assert "bytes; at most 100" in problem(encoded(frames=14))


def test_a_model_of_another_family_takes_no_videos(templates: Mapping[str, Template]) -> None:
    reader = ImageReader(templates["glm4v"])
    assert reader.videos is None
    with pytest.raises(UnreadableVideo, match="takes no videos"):
        reader.frames(GOOD, {})
