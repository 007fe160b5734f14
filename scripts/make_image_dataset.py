"""Make a dataset of coloured squares that ask for their colour: python scripts/make_image_dataset.py --out DIR

The answer is in the image alone, and over half of the squares are green. A policy that does not see earns at most the
share of the most frequent colour. A video changes its colour in the middle, and its last one is the answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}
SIZES = [(56, 56), (84, 56), (56, 112), (112, 84)]


def save_square(path: Path, colour: str, rng: random.Random) -> None:
    """Write a square of this colour with a few pixels of another one, so that no two are alike."""
    image = Image.new("RGB", rng.choice(SIZES), COLOURS[colour])
    for _ in range(20):
        image.putpixel((rng.randrange(image.width), rng.randrange(image.height)), (rng.randrange(256),) * 3)
    image.save(path)


def save_video(path: Path, colours: Sequence[str], rng: random.Random) -> None:
    """Write an MP4 of 12 frames and 3 seconds that has these colours one after the other."""
    import av  # needed for videos only

    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height = rng.choice([(64, 64), (96, 64)])
        stream.pix_fmt = "yuv420p"
        for place in range(12):
            shape = (stream.height, stream.width, 3)
            pixels = np.full(shape, COLOURS[colours[place * len(colours) // 12]], np.uint8)
            pixels[rng.randrange(shape[0]), rng.randrange(shape[1])] = rng.randrange(256)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())


def make_rows(
    folder: Path, rows: int, numbers_of_images: Sequence[int], seed: int, numbers_of_videos: Sequence[int] = (0,)
) -> list[dict[str, object]]:
    """Return rows with these numbers of images and videos in turn; their files are in the folder."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for number in range(rows):
        colour = rng.choices(list(COLOURS), weights=[1, 2, 1])[0]
        paths = [folder / f"{number}-{i}.png" for i in range(numbers_of_images[number % len(numbers_of_images)])]
        for path in paths:
            save_square(path, colour, rng)
        videos = [folder / f"{number}-{i}.mp4" for i in range(numbers_of_videos[number % len(numbers_of_videos)])]
        for path in videos:
            save_video(path, [rng.choice([other for other in COLOURS if other != colour]), colour], rng)
        question = "Which colour?" if paths else "Which colour is last?" if videos else f"Write {colour}."
        message = {"role": "user", "content": "<image>" * len(paths) + "<video>" * len(videos) + question}
        row: dict[str, object] = {"messages": [message], "colour": colour}
        row["images"] = [str(path.absolute()) for path in paths]
        if any(numbers_of_videos):
            row["videos"] = [str(path.absolute()) for path in videos]
            row["chat_template_kwargs"] = {"min_pixels": 32 * 32, "max_pixels": 64 * 64}  # few tokens
        made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write: data.jsonl and images")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--images", type=int, nargs="+", default=[1], help="number of images of each row, in turn")
    parser.add_argument("--videos", type=int, nargs="+", default=[0], help="number of videos of each row, in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = make_rows(arguments.out, arguments.rows, arguments.images, arguments.seed, arguments.videos)
    (arguments.out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{arguments.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
