"""Videos with sound."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def add_sound(path: Path, seconds: float, seed: int) -> None:
    """Write a video again with so much noise as its sound."""
    with av.open(str(path)) as file:
        rate = file.streams.video[0].average_rate
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, (1, round(48_000 * seconds))).astype(np.float32)
    with av.open(str(path), "w") as file:
        stream, sound = file.add_stream("mpeg4", rate=rate), file.add_stream("aac", rate=48_000, layout="mono")
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for begin in range(0, noise.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(noise[:, begin : begin + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48_000, begin
            file.mux(sound.encode(frame))
        for each in (stream, sound):
            file.mux(each.encode())
