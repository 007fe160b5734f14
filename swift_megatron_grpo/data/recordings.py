"""Recordings of rows: their files, the limits on them, and the samples that engine and trainer hear.

A row has paths, URLs, base64 or bytes of WAV and FLAC files. The trainer alone decodes them, once their headers are
within the limits. It mixes them to one channel, resamples them, and cuts them to whole frames; engines are sent the
result, a WAV file of 16 bits whose header follows from its length, so no decoder of theirs reads a stranger's file.
"""

import wave
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.data.image_formats import placeholder_of
from swift_megatron_grpo.data.images import digest_of, file_bytes
from swift_megatron_grpo.types import ModelRecording

RATE = 16_000  # samples per second that a model hears
FRAME = 160  # samples of a frame
_WINDOW = 400  # samples from which an extractor computes one: it looks beyond both ends
SECONDS = (0.1, 30)  # the longest is what the extractor of features takes whole
RATES = (8_000, 192_000)
CHANNELS = 2
BYTES = 2**26
_CHUNK, _TOKENS_OF_CHUNK = 100, 13  # frames that become so many tokens
_HEADER = 44  # bytes
_SAMPLES = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")  # of a file, uncompressed or as FLAC


class UnreadableRecording(ValueError):
    """An element of a row's column `audios` is not a recording that can be trained."""


def recordings_of(row: Mapping[str, Any]) -> list[Any]:
    return list(row.get("audios") or [])


def recording_bytes(source: Any) -> bytes:
    """Return the file of a recording."""
    return file_bytes(source, UnreadableRecording)


def check_header(content: bytes) -> None:
    """Raise UnreadableRecording for a file whose header is not within the limits; nothing is decoded."""
    import soundfile  # needed for recordings only

    if len(content) > BYTES:
        raise UnreadableRecording(f"has {len(content)} bytes; at most {BYTES} can be trained")
    if not (content.startswith(b"fLaC") or (content.startswith(b"RIFF") and content[8:12] == b"WAVE")):
        raise UnreadableRecording(
            f"begins with {content[:12]!r} and is neither a WAV nor a FLAC file; convert it, for example with ffmpeg"
        )
    try:
        info = soundfile.info(BytesIO(content))
    except Exception as error:
        raise UnreadableRecording("has a damaged header") from error
    seconds = info.frames / info.samplerate
    for value, name, (least, most) in (
        (info.samplerate, "samples per second", RATES),
        (info.channels, "channels", (1, CHANNELS)),
        (seconds, "seconds", SECONDS),
    ):
        if not least <= value <= most:
            raise UnreadableRecording(f"has {value:g} {name}; {least} to {most} can be trained")
    if info.subtype not in _SAMPLES:
        raise UnreadableRecording(f"has samples of type {info.subtype}; use one of {', '.join(_SAMPLES)}")


@lru_cache(maxsize=16)
def as_heard(content: bytes) -> bytes:
    """Return what engine and trainer hear of a file. Raises UnreadableRecording for one outside of the limits."""
    import librosa  # needed for recordings only
    import soundfile

    check_header(content)
    promised = soundfile.info(BytesIO(content)).frames
    try:
        samples, rate = soundfile.read(BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # of libsndfile
        raise UnreadableRecording(f"is cut off or damaged: {error}") from error
    if len(samples) != promised:
        raise UnreadableRecording(f"is cut off: {len(samples)} of {promised} samples can be read")
    if not np.isfinite(samples).all():
        raise UnreadableRecording("has samples that are not finite")
    heard = samples.mean(axis=1)
    if rate != RATE:
        heard = librosa.resample(heard, orig_sr=rate, target_sr=RATE)
    whole = heard[: len(heard) // FRAME * FRAME]
    return wav_of(with_silence(np.clip(np.round(whole * 2**15), -(2**15), 2**15 - 1).astype("<i2")))


def with_silence(samples: np.ndarray) -> np.ndarray:
    """Return samples of 16 bits of at least a second, with silence in place of the last 12.5 ms.

    Otherwise rows of a recording would depend on others, which vLLM embeds together. The last window of a shorter one
    reads zeros there, and a reflection of the end where it is alone. Convolutions read what a chunk is filled up with,
    and the only chunk of less than a second is not filled up where it is alone.
    """
    ended = np.array(samples)
    ended[-_WINDOW // 2 :] = 0
    return np.pad(ended, (0, max(0, _CHUNK * FRAME - len(ended))))


def wav_of(samples: np.ndarray) -> bytes:
    """Return the file of these samples of 16 bits."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def check_heard(content: bytes) -> None:
    """Raise ValueError unless a client has sent a file as `as_heard` makes it. Nothing is decoded for that."""
    samples, rest = divmod(len(content) - _HEADER, 2)
    least, most = (int(RATE * seconds) for seconds in SECONDS)
    if not least <= samples <= most or rest or samples % FRAME:
        raise ValueError(
            f"must be a recording of {SECONDS[0]} to {SECONDS[1]} s, in whole frames of {FRAME} samples of 16 bits"
        )
    if content[:_HEADER] != wav_of(np.zeros(samples, dtype="<i2"))[:_HEADER]:
        raise ValueError(f"must be a recording in a WAV file of one channel, {RATE} samples per second and 16 bits")


def samples_of(heard: bytes) -> np.ndarray:
    """Return the samples [n] of such a file, from -1 to 1, as decoders return them."""
    return np.frombuffer(heard, dtype="<i2", offset=_HEADER).astype(np.float32) / 2**15


def heard_files_of(row: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return digest and content of what engines are sent of each recording of a row, in order."""
    files = [as_heard(recording_bytes(source)) for source in recordings_of(row)]
    return [(digest_of(file), file) for file in files]


def sent_recordings(row: Mapping[str, Any]) -> list[str]:
    """Return the same contents as base64."""
    return [b64encode(content).decode() for _, content in heard_files_of(row)]


def tokens_of(samples: int) -> int:
    """Return the tokens of a recording: 13 of each 100 frames, and an eighth of the rest's frames, rounded up."""
    chunks, rest = divmod(samples // FRAME, _CHUNK)
    return chunks * _TOKENS_OF_CHUNK + -(-rest // 8)


@dataclass(frozen=True, slots=True)
class RecordingFormat:
    """The extractor of a model's features, and the token that stands for a part of a recording (Qwen3-Omni)."""

    extractor: Any  # of transformers
    placeholder: int

    def read(self, heard: bytes) -> ModelRecording:
        samples = samples_of(heard)
        return ModelRecording(digest_of(heard), tokens_of(len(samples)), partial(self._features, samples))

    def _features(self, samples: np.ndarray) -> torch.Tensor:
        """Return the frames [bins, frames] of a recording."""
        found = self.extractor(
            samples, sampling_rate=RATE, return_attention_mask=True, padding=True, truncation=False, return_tensors="pt"
        )
        features: torch.Tensor = found["input_features"][0][:, found["attention_mask"][0].bool()]
        return features


def recording_format(processor: Any) -> RecordingFormat | None:
    """Return the format of a processor; None: it takes no recordings."""
    if "audio_token" not in vars(processor):
        return None
    extractor = processor.feature_extractor
    if (extractor.sampling_rate, extractor.hop_length, extractor.n_fft) != (RATE, FRAME, _WINDOW):
        raise ValueError(
            f"the feature extractor takes {extractor.sampling_rate} samples per second, in frames of "
            f"{extractor.hop_length} and windows of {extractor.n_fft}; only {RATE}, {FRAME} and {_WINDOW} are supported"
        )
    return RecordingFormat(extractor, placeholder_of("audio", processor))
