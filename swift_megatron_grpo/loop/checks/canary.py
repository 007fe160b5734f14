"""The fixed text, with media if the run has some, whose log-probs trainer and engines compute after a sync."""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from swift_megatron_grpo.data.image_reader import ImageReader, Medium
from swift_megatron_grpo.data.images import image_bytes
from swift_megatron_grpo.data.recordings import FRAME, wav_of
from swift_megatron_grpo.data.videos import Frames
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.settings.config import CANARY_TOKENS
from swift_megatron_grpo.training.engine import EngineSettings
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import PlacedImage, Sample, ScoredText

# Prose, numbers and code, as most models have seen them. The cost of an engine's response grows with the length.
CANARY_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969 two people walked on the Moon; 12 have been there since. "
    "If 3x + 5 = 20, then x = 5, because 3 * 5 = 15 and 15 + 5 = 20. def add(a, b): return a + b\n"
    "Water boils at 100 degrees Celsius at sea level, and freezes at 0. Paris is the capital of France. "
)
_LEAST_TEXT = 32  # tokens behind the image, however many the image has


def canary_image(width: int, height: int) -> bytes:
    """Return a PNG of noise, in which no two patches are alike."""
    noise = random.Random(0).randbytes(3 * width * height)
    return image_bytes(Image.frombytes("RGB", (width, height), noise))


def canary_recording() -> bytes:
    """Return 0.64 seconds of noise, which are 8 tokens, as engines are sent it."""
    return wav_of(np.frombuffer(random.Random(0).randbytes(2 * 64 * FRAME), dtype="<i2"))


def canary_video(width: int, height: int, sound: bytes) -> bytes:
    """Return two frames of noise, as engines are sent them."""
    noise = np.frombuffer(random.Random(1).randbytes(2 * 3 * width * height), np.uint8)
    return Frames((0, 1), total=2, rate=2.0, height=height, width=width, sound=sound).file_of(noise)


@dataclass(frozen=True)
class Canary:
    """The trainer's log-probs of the fixed text. Every rank calls `logprobs`."""

    text: ScoredText
    tokens: list[int]  # the text as the engine expands it
    images: tuple[PlacedImage, ...]  # and video and recording; the log-probs of their tokens are not compared
    passes: Passes  # at temperature 1
    coordinator: Coordinator

    @property
    def _compared(self) -> list[bool]:
        of_image = {placed.start + i for placed in self.images for i in range(placed.image.num_tokens)}
        return [i > 0 and i not in of_image for i in range(len(self.tokens))]

    def logprobs(self) -> list[list[float]]:
        """Return the log-probs of every data-parallel rank, whose copies of the weights must not diverge either."""
        sample = Sample(tokens=self.tokens, completion_mask=self._compared, advantage=0.0, images=self.images)
        values = self.passes.infer([sample] * self.passes.fewest_samples)
        gathered = self.coordinator.gather_samples(values, self.passes.parallel)
        return [copy.logprobs for copy in gathered.values()]

    def compared(self, logprobs: Sequence[float]) -> list[float]:
        """Return those of an engine's log-probs, of all tokens but the first, that `logprobs` returns."""
        if len(logprobs) != len(self.tokens) - 1:
            raise RuntimeError(
                f"the engine returned {len(logprobs)} log-probs for a fixed text of {len(self.tokens)} tokens: it "
                "expands the text's image to another number of tokens than the trainer"
            )
        return [value for value, compared in zip(logprobs, self._compared[1:], strict=True) if compared]


def build_canary(
    tokenizer: Any,  # of the template
    image_reader: ImageReader | None,  # None: the run has no media
    media: Set[str],  # image, video, audio: that the run has
    longest: int | None,  # sequence of the engine; None: unknown
    trained_models: Sequence[Any],
    coordinator: Coordinator,
) -> Canary:
    """Return the canary of a run: CANARY_TOKENS of text, or media of each kind, and what text fits behind them."""
    passes = Passes(trained_models, EngineSettings(temperature=1.0, micro_batch_size=1))
    text: list[int] = tokenizer.encode(CANARY_TEXT, add_special_tokens=False)[:CANARY_TOKENS]
    room = None if longest is None else longest - 1  # vLLM samples one more token
    if image_reader is None:
        text = text[:room]
        return Canary(ScoredText(text), text, (), passes, coordinator)
    image = canary_image(*image_reader.format.small_size) if "image" in media else None
    recording = canary_recording() if "audio" in media else None
    video = None
    if "video" in media:
        sound = recording if image_reader.plays_sound else None
        video = canary_video(*image_reader.format.small_size, sound or b"")
        recording = None if sound else recording  # which vLLM does not hear next to a video with sound
    shown: list[int] = []  # as a request has it
    read: list[Medium] = []
    if image is not None:
        shown += image_reader.placeholder_in_text("image", image)
        read.append(image_reader.exact(image))
    if video is not None:
        shown += image_reader.placeholder_in_text("video", video)
        read += image_reader.frames(video, {})
    if recording is not None:
        shown += image_reader.placeholder_in_text("audio", recording)
        read.append(image_reader.recording(recording))
    expanded = image_reader.expand(shown, read)  # as the model reads it
    behind = max(CANARY_TOKENS - len(expanded), _LEAST_TEXT)
    if room is not None and room > len(expanded):  # a limit of less does not count the tokens of images
        behind = min(behind, room - len(expanded))
    text = text[:behind]
    placed = image_reader.place("of the check of weights", read, expanded)
    return Canary(ScoredText([*shown, *text], image, recording, video), [*expanded, *text], placed, passes, coordinator)
