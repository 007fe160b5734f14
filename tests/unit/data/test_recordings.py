"""Recordings of rows: limits by their headers, what engines are sent of them, and their tokens."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from swift_megatron_grpo.data.recordings import (
    BYTES,
    FRAME,
    RATE,
    RecordingFormat,
    UnreadableRecording,
    as_heard,
    check_header,
    check_heard,
    recording_bytes,
    samples_of,
    tokens_of,
    wav_of,
    with_silence,
)
from tests.support.choice import rest_nightly


def encoded(rate: int = RATE, seconds: float = 0.5, channels: int = 1, **options: Any) -> bytes:
    file = BytesIO()
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (round(rate * seconds), channels))
    soundfile.write(file, samples, rate, **{"format": "WAV", **options})
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"format": "FLAC"}, {"subtype": "PCM_16"}, {"seconds": 0.505}])
def test_samples_at_the_models_rate_are_heard_as_they_are(options: dict[str, Any]) -> None:
    content = encoded(**options)
    heard = as_heard(content)
    check_heard(heard)
    expected, _ = soundfile.read(BytesIO(content), dtype="float32")
    audible = len(expected) // FRAME * FRAME - 200
    assert np.array_equal(samples_of(heard)[:audible], expected[:audible])
    assert len(samples_of(heard)) == RATE and not samples_of(heard)[audible:].any()
    decoded, rate = soundfile.read(BytesIO(heard), dtype="float32")  # as engines decode it
    assert rate == RATE and np.array_equal(decoded, samples_of(heard))


def test_features_do_not_depend_on_other_recordings_of_a_prompt() -> None:
    """vLLM extracts those of a prompt together, and the trainer one by one. The end of the first one is loudest."""
    samples = np.random.default_rng(0).uniform(-0.2, 0.2, (2, 2 * RATE))
    samples[0, 3 * RATE // 2 - 400 : 3 * RATE // 2] *= 4
    lengths = (3 * RATE // 2, 2 * RATE)
    heard = [
        samples_of(wav_of(with_silence((each[:length] * 2**15).astype("<i2"))))
        for each, length in zip(samples, lengths, strict=True)
    ]

    def features(*recordings: np.ndarray) -> list[np.ndarray]:
        found = WhisperFeatureExtractor(feature_size=128)(
            list(recordings), sampling_rate=RATE, return_attention_mask=True, padding=True, truncation=False
        )
        return [np.asarray(each)[:, : length // FRAME] for each, length in zip(
            found["input_features"], [len(each) for each in recordings], strict=True)]  # fmt: skip

    together, alone = features(*heard), [*features(heard[0]), *features(heard[1])]
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one - other).max() < 1e-6


@pytest.mark.parametrize("rate", rest_nightly([8_000, 22_050, 44_100, 192_000], [44_100]))
def test_others_are_mixed_and_resampled(rate: int) -> None:
    """A tone keeps its pitch and its loudness."""
    times = np.arange(rate) / rate
    file = BytesIO()
    left_and_right = np.stack([0.5 * np.sin(2 * np.pi * 440 * times), np.zeros(rate)], axis=1)
    soundfile.write(file, left_and_right, rate, format="WAV", subtype="FLOAT")
    heard = samples_of(as_heard(file.getvalue()))
    assert len(heard) == RATE
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert np.abs(heard - expected)[RATE // 10 : -RATE // 10].max() < 2e-3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is neither a WAV nor a FLAC file"),
        (b"ID3\x04" + bytes(100), "is neither a WAV nor a FLAC file; convert it"),
        (encoded(format="OGG"), "is neither a WAV nor a FLAC file"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(100), "is neither a WAV nor a FLAC file"),
        (encoded()[:20], "has a damaged header"),
        (b"fLaC" + bytes(100), "has a damaged header"),
        (encoded(rate=4_000), "has 4000 samples per second; 8000 to 192000"),
        (encoded(rate=384_000), "has 384000 samples per second"),
        (encoded(channels=6), "has 6 channels; 1 to 2"),
        (encoded(seconds=0.05), "has 0.05 seconds; 0.1 to 30"),
        (encoded(seconds=30.1), "has 30.1 seconds; 0.1 to 30"),
        (encoded(subtype="IMA_ADPCM"), "has samples of type IMA_ADPCM; use one of PCM_S8"),
        (b"RIFF" + bytes(BYTES), f"has {BYTES + 4} bytes; at most {BYTES}"),
    ],
)
def test_a_file_outside_of_the_limits_is_refused_before_it_is_decoded(
    content: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(soundfile, "read", decode)
    for check in (check_header, as_heard):
        with pytest.raises(UnreadableRecording, match=problem):
            check(content)


def test_a_flac_that_promises_ten_hours_is_refused_by_its_header() -> None:
    """The number of samples has 36 bits, after 18 bytes and four bits more."""
    content = bytearray(encoded(format="FLAC"))
    assert content[:4] == b"fLaC"
    content[21:26] = (content[21] & 0xF0 | 0).to_bytes(1, "big") + (RATE * 36_000).to_bytes(4, "big")
    with pytest.raises(UnreadableRecording, match="has 36000 seconds"):
        as_heard(bytes(content))


def test_a_file_that_is_cut_off_or_not_finite_is_refused() -> None:
    content = encoded(format="FLAC")
    with pytest.raises(UnreadableRecording, match="is cut off"):
        as_heard(content[: len(content) // 2])
    file = BytesIO()
    soundfile.write(file, np.array([np.nan] * RATE), RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(UnreadableRecording, match="not finite"):
        as_heard(file.getvalue())


HEARD = as_heard(encoded())
HOSTILE = {
    "nothing": b"",
    "path": b"/etc/passwd",
    "URL": b"http://127.0.0.1/a.wav",
    "stereo": encoded(channels=2, subtype="PCM_16"),
    "rate": encoded(rate=44_100, subtype="PCM_16"),
    "float": encoded(subtype="FLOAT"),
    "FLAC": encoded(format="FLAC"),
    "short": wav_of(np.zeros(FRAME, dtype="<i2")),
    "long": wav_of(np.zeros(31 * RATE, dtype="<i2")),
    "part of a frame": wav_of(np.zeros(RATE + 1, dtype="<i2")),
    "cut off": HEARD[:-2 * FRAME],
    "promises more": HEARD[:40] + (2**31 - 1).to_bytes(4, "little") + HEARD[44:],
    "other codec": HEARD[:20] + b"\x11\x00" + HEARD[22:],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_takes_what_a_trainer_sends_and_nothing_else(name: str) -> None:
    check_heard(HEARD)
    with pytest.raises(ValueError, match="must be a recording") as refused:
        check_heard(HOSTILE[name])
    assert "passwd" not in str(refused.value)


def test_tokens_are_those_of_transformers() -> None:
    for frames in range(10, 3_001):
        expected = int(_get_feat_extract_output_lengths(frames))
        assert tokens_of(frames * FRAME) == tokens_of(frames * FRAME + FRAME - 1) == expected


@pytest.mark.parametrize(("seconds", "frames", "tokens"), [(0.5, 100, 13), (1.5, 150, 20)])
def test_a_recording_has_at_least_a_second_of_frames_of_160_samples(seconds: float, frames: int, tokens: int) -> None:
    found = RecordingFormat(WhisperFeatureExtractor(feature_size=128), 7).read(as_heard(encoded(seconds=seconds)))
    assert found.encode().shape == (128, frames) and found.num_tokens == tokens and not found.has_axes


def test_sources_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(HEARD)
    text = base64.b64encode(HEARD).decode()
    sources = [str(tmp_path / "a.wav"), HEARD, text, f"data:audio/wav;base64,{text}", {"bytes": HEARD}]
    assert all(recording_bytes(source) == HEARD for source in [*sources, {"bytes": None, "path": sources[0]}])
    for source, problem in ((7, "is int"), ("", "is str"), (str(tmp_path / "no.wav"), "cannot be read")):
        with pytest.raises(UnreadableRecording, match=problem):
            recording_bytes(source)
