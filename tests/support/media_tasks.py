"""Tasks whose answer is in an image, a recording or a video alone, and tiny models that can learn them.

The question is the same in all rows. A completion is one token, and names a class by the code of its character
(tests/programs/e2e/named_class.py), so that every letter is an answer. A blind row has the same file as all others.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.runs import make_model

_RATE, _SECONDS = 16_000, 0.5
_SIDE, _BAR, _STEP, _FRAMES = 64, 24, 8, 8
_CONVOLUTIONS_GAIN = 3.0  # of features of sounds: 0.3 at the start, and about 2 behind three convolutions
_SPEAKING = ("talker.", "code2wav.")


def _write_colour(file: Path, label: int | None, rng: random.Random) -> None:
    """Write a square in one of three colours, with a few other pixels."""
    image = Image.new("RGB", (56, 56), [(220, 30, 30), (30, 200, 40), (30, 40, 220), (128, 128, 128)][_or_last(label)])
    for _ in range(20):
        image.putpixel((rng.randrange(56), rng.randrange(56)), (rng.randrange(256),) * 3)
    image.save(file)


def _write_tone(file: Path, label: int | None, rng: random.Random) -> None:
    """Write a low or a high tone of any pitch within an octave, and with a little noise; None: noise alone."""
    times = np.arange(round(_RATE * _SECONDS)) / _RATE
    lowest, amplitude = [(150, 0.5), (1500, 0.5), (150, 0.0)][_or_last(label)]
    tone = amplitude * np.sin(2 * np.pi * (rng.uniform(lowest, 2 * lowest) * times + rng.random()))
    noise = np.random.default_rng(rng.randrange(2**31)).normal(0, 0.01, times.shape)
    soundfile.write(file, tone + noise, _RATE)


def _write_motion(file: Path, label: int | None, rng: random.Random) -> None:
    """Write a bar that moves to the right or to the left, and in again at the other end; None: an empty video.

    It starts anywhere, so no frame shows by itself where it moves.
    """
    with av.open(str(file), "w") as video:
        stream = video.add_stream("mpeg4", rate=4)
        stream.width = stream.height = _SIDE
        stream.pix_fmt = "yuv420p"
        start, step = rng.randrange(_SIDE), -_STEP if label else _STEP
        for number in range(_FRAMES):
            pixels = np.full((_SIDE, _SIDE, 3), 30, np.uint8)
            pixels[rng.randrange(_SIDE), rng.randrange(_SIDE)] = rng.randrange(256)
            if label is not None:
                pixels[:, (start + step * number + np.arange(_BAR)) % _SIDE] = 220
            video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())


def _or_last(label: int | None) -> int:
    return -1 if label is None else label


@dataclass(frozen=True)
class Task:
    kind: str  # model_type
    column: str
    suffix: str
    classes: int
    write: Callable[[Path, int | None, random.Random], None]  # None: of no class

    @property
    def chance(self) -> float:
        return 1 / self.classes

    def write_rows(self, folder: Path, rows: int, seed: str, blind: bool) -> Path:
        """Write a dataset whose classes are equally frequent. `blind`: all rows have the same file, of no class."""
        folder.mkdir()
        lines = []
        for number in range(rows):
            label, rng = number % self.classes, random.Random(f"{seed} {number}")
            file = folder / f"{0 if blind else number}.{self.suffix}"
            if not file.exists():
                self.write(file, None if blind else label, rng)
            content = f"<{self.column.removesuffix('s')}>Which?"
            lines.append({"messages": [{"role": "user", "content": content}], self.column: [str(file)],
                          "label": label, "classes": self.classes})  # fmt: skip
            if self.column == "videos":
                lines[-1]["chat_template_kwargs"] = {"min_pixels": 32**2, "max_pixels": _SIDE**2}
        dataset = folder / "rows.jsonl"
        dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return dataset


TASKS = {
    "colours": Task("qwen2_5_vl", "images", "png", 3, _write_colour),
    "tones": Task("qwen3_omni_moe", "audios", "wav", 2, _write_tone),
    "motion": Task("qwen2_5_vl", "videos", "mp4", 2, _write_motion),
}


def make_learner(folder: Path, kind: str, seed: int) -> Path:
    """Make a tiny model whose parts pass on what they see and hear.

    The weights of other tests' models are smaller: behind their convolutions, features of a low and of a high tone
    differ by 1 %, and here by most of them.
    """
    file = make_model(folder, kind, ["--seed", str(seed)]) / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.startswith(_SPEAKING) or not name.endswith("weight") or "embed_tokens" in name:
            continue
        if value.ndim == 1:
            if ".ln_" in name:
                tensors[name] = torch.ones_like(value)
            continue
        gain = _CONVOLUTIONS_GAIN if "audio_tower.conv" in name else 1.0
        scale = gain / math.sqrt(math.prod(value.shape[1:]))
        tensors[name] = (value.float() / value.float().std() * scale).to(value.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
