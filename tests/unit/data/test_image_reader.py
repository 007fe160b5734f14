"""Images of rows: read from what datasets hold, placed among the engine's tokens, cut as by the model's processor."""

from __future__ import annotations

import base64
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from swift.model import get_processor
from swift.template import get_template

from swift_megatron_grpo.cli.check_layouts.layouts import template_for_images
from swift_megatron_grpo.cli.tiny_models import TINY, Shape, save_composite
from swift_megatron_grpo.data.encoded_rows import ImagesOfRow, check_images, check_row
from swift_megatron_grpo.data.image_formats import MismatchedImages
from swift_megatron_grpo.data.image_reader import ImageReader, placeholder_runs
from swift_megatron_grpo.data.images import UnreadableImage, image_bytes, image_size
from swift_megatron_grpo.data.prompts import PromptSource

SMALL = {"min_pixels": 1024, "max_pixels": 4096}
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], Any]:
    made = {}
    for kind in ("qwen2_5_vl", "qwen3_vl", "glm4v", "internvl"):
        folder = tmp_path_factory.mktemp(kind)
        save_composite(folder, Shape(kind, TINY))
        for max_pixels in (None, 5000):
            processor = get_processor(str(folder), model_type=kind)
            template = template_for_images(kind)
            made[kind, max_pixels] = get_template(
                processor, template_type=template, max_length=64, max_pixels=max_pixels
            )
    return made


@pytest.fixture(scope="module")
def reader(templates: dict[tuple[str, int | None], Any]) -> ImageReader:
    return ImageReader(templates["qwen2_5_vl", None])


def png(width: int, height: int, seed: int = 0) -> bytes:
    image, rng, file = Image.new("RGB", (width, height)), random.Random(seed), BytesIO()
    image.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(width * height)])
    image.save(file, format="PNG")
    return file.getvalue()


def row(content: str, *images: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "images": list(images)}


def test_paths_bytes_base64_and_pil_images_are_the_same_image(tmp_path: Path, reader: ImageReader) -> None:
    content, path = png(56, 84), tmp_path / "a.png"
    path.write_bytes(content)
    encoded = base64.b64encode(content).decode()
    sources = [str(path), {"bytes": None, "path": str(path)}, content, {"bytes": content, "path": None}]
    sources += [encoded, f"data:image/png;base64,{encoded}"]
    assert {image_bytes(source) for source in sources} == {content}
    assert len({*map(id, reader.images(row("", *sources)))}) == 1  # one object, which vision towers embed once
    opened = Image.open(BytesIO(content))
    assert Image.open(BytesIO(image_bytes(opened))).tobytes() == opened.tobytes()


@pytest.mark.parametrize("source", ["/nowhere/a.png", "no base64!", None, 3, {"bytes": None, "path": None}])
def test_what_is_no_image_is_refused(source: Any) -> None:
    with pytest.raises(UnreadableImage):
        image_size(image_bytes(source))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("max_pixels", [None, 5000])
def test_pixels_are_those_of_the_template_and_the_processor(
    templates: dict[tuple[str, int | None], Any], kind: str, max_pixels: int | None
) -> None:
    """Any size: the grid from the header of the file is the one into which template and processor cut."""
    template = templates[kind, max_pixels]
    reader, rng = ImageReader(template), random.Random(0)
    for _ in range(24):
        content = png(rng.randint(20, 300), rng.randint(20, 300), seed=1)
        options = rng.choice([{}, {"max_pixels": 6000}, SMALL, {"resized_height": 90, "resized_width": 60}])
        given = row("<image>", {"bytes": content, "path": None}) | {"chat_template_kwargs": options}
        [image] = reader.images(given)
        patches = image.encode()
        assert patches.dtype == torch.uint8
        template.set_mode("vllm")
        sent = template.encode(given)
        cut = template.processor.image_processor(
            images=sent["images"], **sent.get("mm_processor_kwargs", {}), return_tensors="pt"
        )
        assert tuple(cut["image_grid_thw"][0].tolist()) == image.grid
        factor, offset = torch.tensor(image.channels).repeat_interleave(patches.shape[1] // 3, dim=0).unbind(1)
        assert (patches * factor + offset - cut["pixel_values"]).abs().max() < 5e-7


@pytest.mark.parametrize("max_pixels", [None, 5000])
def test_tiles_are_those_of_the_processor(templates: dict[tuple[str, int | None], Any], max_pixels: int | None) -> None:
    """Their number follows from the header of the file; with several, one more shows the whole image."""
    template = templates["internvl", max_pixels]
    reader, rng = ImageReader(template), random.Random(0)
    counts = set()
    for _ in range(12):
        given = row("<image>", png(rng.randint(20, 300), rng.randint(20, 300), seed=1))
        given["chat_template_kwargs"] = rng.choice([{}, {"max_pixels": 6000}])
        [image] = reader.images(given)
        tiles = image.encode()
        template.set_mode("vllm")
        cut = template.processor(images=template.encode(given)["images"], text="<IMG_CONTEXT>", return_tensors="pt")
        counts.add(len(tiles))
        assert image.grid == (len(tiles), 4, 4) and not image.has_axes
        assert reader.expand([7, reader.format.placeholder], [image]) == [7, *cut["input_ids"][0].tolist()]
        factor, offset = torch.tensor(image.channels).repeat_interleave(tiles.shape[1] // 3, dim=0).unbind(1)
        assert (tiles * factor + offset - cut["pixel_values"].flatten(1)).abs().max() < 5e-7
    assert {1, 3, 5} <= counts
    [small] = reader.images(row("<image>", png(*reader.format.small_size)))
    assert small.grid == (1, 4, 4)


def test_images_are_placed_where_the_engine_has_expanded_them(reader: ImageReader) -> None:
    images = reader.images(row("", png(56, 56), png(84, 56)))
    token = reader.format.placeholder
    tokens = reader.expand([1, token, 2, token, 3], images)
    assert tokens == [1, *[token] * 4, 2, *[token] * 6, 3]
    assert [placed.start for placed in reader.place("p", images, tokens)] == [1, 6]
    for others in ([1, *[token] * 4, 2, 3], [*tokens, token], [1, *[token] * 10]):
        with pytest.raises(MismatchedImages, match=r"prompt p: .* \[4, 6\]; use the same --model"):
            reader.place("p", images, others)
    assert placeholder_runs([], token) == []


def test_rows_are_refused_with_their_problem(reader: ImageReader) -> None:
    def problem(content: Any, *images: Any) -> str:
        return str(check_row(row(content, *images), reader, PLACEHOLDERS).problem)

    image = png(56, 56)
    assert problem("<image><image>", image) == "has 2 tags <image> for 1 images in the column images"
    assert problem("What is <image>?") == "has 1 tags <image> for 0 images in the column images"
    assert "has an image that cannot be read: /nowhere/a.png: no such file" in problem("<image>", "/nowhere/a.png")
    assert "cannot be resized" in problem("<image>", png(2000, 4))
    for written in ("<|image_pad|>", "<img>a.png</img>"):
        assert problem(f"see {written}", image).startswith(f"has {written} in its text; images are written <image>")
    for content, images in (("<image>", [image]), ("no tag", [image]), ("What is <img> in HTML?", [])):
        assert check_row(row(content, *images), reader, PLACEHOLDERS) == ImagesOfRow(len(images), 4 * len(images))


def test_damaged_files_are_named_before_the_run(tmp_path: Path, reader: ImageReader) -> None:
    """The header of a file that is cut off is whole, and a text may be named .png."""

    def problem(name: str, content: bytes) -> str | None:
        (tmp_path / name).write_bytes(content)
        return check_row(row("<image>", str(tmp_path / name)), reader, PLACEHOLDERS).problem

    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        content = encoded(kind)
        assert problem(f"whole.{kind}", content) is None
        cut = problem(f"cut.{kind}", content[: len(content) // 2]) or ""
        assert cut.startswith(f"has the image {tmp_path}/cut.{kind}, which "), kind
    text = problem("text.png", b"# A text, whoever has named it .png")
    assert text == f"has the image {tmp_path}/text.png, which PIL cannot open: it begins with b'# A text, whoeve'"


def encoded(kind: str, size: int = 64) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(png(size, size))).save(file, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.png", "images/a.png", "abcd.jpeg"])
def test_a_relative_path_that_does_not_exist_is_not_taken_for_base64(reader: ImageReader, name: str) -> None:
    """Python's base64 skips dots and slashes: a.png are three bytes."""
    problem = check_row(row("<image>", name), reader, PLACEHOLDERS).problem
    assert problem == (
        f"has an image that cannot be read: {name}: no such file in {Path.cwd()} or $ROOT_IMAGE_DIR, and not base64"
    )


def test_images_that_servers_refuse_are_refused_if_servers_generate(tmp_path: Path, reader: ImageReader) -> None:
    path = tmp_path / "a.ppm"
    path.write_bytes(encoded("PPM"))
    assert check_row(row("<image>", str(path)), reader, PLACEHOLDERS).problem is None
    sent = check_row(row("<image>", str(path)), reader, PLACEHOLDERS, sent=True).problem
    assert sent == f"has the image {path}, which servers refuse: it must be an image: PNG, JPEG, WEBP, GIF, BMP, TIFF"
    large = Image.new("1", (8200, 8200))
    large.save(tmp_path / "large.png")
    sent = check_row(row("<image>", str(tmp_path / "large.png")), reader, PLACEHOLDERS, sent=True).problem or ""
    assert sent.endswith("which servers refuse: it must have at most 67108864 pixels")


def test_images_in_messages_are_those_of_the_column(reader: ImageReader) -> None:
    """ms-swift's template moves them; a run that reads the column alone starts vLLM without a vision tower."""
    image, other = (base64.b64encode(png(56, height)).decode() for height in (56, 84))
    parts = [
        {"type": "image", "image": image}, {"type": "text", "text": "or "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}},
    ]  # fmt: skip
    given = {"messages": [{"role": "user", "content": parts}]}
    assert check_row(given, reader, PLACEHOLDERS) == ImagesOfRow(2, 4 + 6)
    [prompt] = PromptSource([given], seed=1, shuffle=False).take(1)
    assert prompt.row["messages"] == [{"role": "user", "content": "<image>or <image>"}]
    assert [image.grid for image in reader.images(prompt.row)] == [(1, 4, 4), (1, 6, 4)]
    assert reader.encode_prompt(prompt.row) == reader.encode_prompt(given)
    in_column = row([{"type": "image"}, {"type": "text", "text": "?"}], png(56, 56))
    assert check_row(in_column, reader, PLACEHOLDERS) == ImagesOfRow(1, 4)
    with pytest.raises(ValueError, match="images both in its messages and in the column"):
        check_row(row(parts, png(56, 56)), reader, PLACEHOLDERS)


def test_the_most_images_of_a_row_are_counted_and_long_prompts_refused() -> None:
    def check(rows: list[ImagesOfRow], *lengths: Any) -> int:
        return check_images(Dataset.from_list([{"number": 1}] * len(rows)), rows, *lengths)

    rows = [ImagesOfRow(0), ImagesOfRow(2, 60), ImagesOfRow(1, 100)]
    assert check(rows, 200, 50) == 2 and check(rows, None, 50) == 2 and check([], 9, 1) == 0
    with pytest.raises(ValueError, match=r"row 2 has 100; use a smaller --max_pixels, or .* above 150"):
        check(rows, 150, 50)
    with pytest.raises(ValueError, match=r"1 of 2 rows .* row 1 has 2 tags"):
        check([ImagesOfRow(1), ImagesOfRow(1, problem="has 2 tags")], None, 1)


@pytest.mark.parametrize("longest", [4096, 10**8])
def test_text_is_not_refused_for_images_where_vllm_cuts_completions(longest: int) -> None:
    """--vllm_max_model_len 4096 --max_completion_length 4096, as in published scripts: a note says what is cut."""
    dataset = Dataset.from_list([{"number": 1}] * 2)
    assert check_images(dataset, [ImagesOfRow(0), ImagesOfRow(1, 4000)], 4096, longest) == 1
    with pytest.raises(ValueError, match="row 1 has 4096"):
        check_images(dataset, [ImagesOfRow(0), ImagesOfRow(1, 4096)], 4096, longest)
