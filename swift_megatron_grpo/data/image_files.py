"""Images in the rows of a dataset: paths, URLs, base64, bytes or PIL images, several per row; read to bytes here."""

from __future__ import annotations

from hashlib import blake2b
from io import BytesIO
from typing import Any

from PIL import Image
from swift.template.vision_utils import load_file


class UnreadableImage(ValueError):
    """An element of a row's column `images` is no image."""


def images_of(row: dict[str, Any]) -> list[Any]:
    return list(row.get("images") or [])


def image_bytes(source: Any) -> bytes:
    """Return the file of an image. A PIL image becomes a PNG, which loses nothing."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        file = BytesIO()
        source.save(file, format="PNG")
        return file.getvalue()
    if not source or not isinstance(source, str | bytes):
        raise UnreadableImage(f"is {type(source).__name__}, neither a path, a URL, base64, bytes nor a PIL image")
    try:
        content: bytes = load_file(source).getvalue()
    except Exception as error:  # whatever a file system, a download or base64 raises
        raise UnreadableImage(f"cannot be read: {_name(source)}: {type(error).__name__}") from error
    return content


def image_size(content: bytes) -> tuple[int, int]:
    """Return width and height, from the header of the file."""
    try:
        with Image.open(BytesIO(content)) as image:
            return image.size
    except Exception as error:
        raise UnreadableImage(f"is no image that PIL can open: {error}") from error


def digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()


def _name(source: str | bytes) -> str:
    text = source if isinstance(source, str) else f"{len(source)} bytes"
    return text if len(text) <= 200 else f"{text[:40]}... ({len(text)} characters, read as base64)"
