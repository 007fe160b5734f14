"""Make a dataset of coloured squares that ask for their colour: python scripts/make_image_dataset.py --out DIR

The answer is in the image alone, and over half of the squares are green. A policy that does not see earns at most the
share of the most frequent colour.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}
SIZES = [(56, 56), (84, 56), (56, 112), (112, 84)]


def save_square(path: Path, colour: str, rng: random.Random) -> None:
    """Write a square of this colour with a few pixels of another one, so that no two are alike."""
    image = Image.new("RGB", rng.choice(SIZES), COLOURS[colour])
    for _ in range(20):
        image.putpixel((rng.randrange(image.width), rng.randrange(image.height)), (rng.randrange(256),) * 3)
    image.save(path)


def make_rows(folder: Path, rows: int, numbers_of_images: Sequence[int], seed: int) -> list[dict[str, object]]:
    """Return rows with these numbers of images in turn; their files are in the folder."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for number in range(rows):
        colour = rng.choices(list(COLOURS), weights=[1, 2, 1])[0]
        paths = [folder / f"{number}-{i}.png" for i in range(numbers_of_images[number % len(numbers_of_images)])]
        for path in paths:
            save_square(path, colour, rng)
        question = "<image>" * len(paths) + ("Which colour?" if paths else f"Write {colour}.")
        message = {"role": "user", "content": question}
        made.append({"messages": [message], "colour": colour, "images": [str(path.absolute()) for path in paths]})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write: data.jsonl and images")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--images", type=int, nargs="+", default=[1], help="number of images of each row, in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = make_rows(arguments.out, arguments.rows, arguments.images, arguments.seed)
    (arguments.out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{arguments.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
