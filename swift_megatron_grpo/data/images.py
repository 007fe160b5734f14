"""Image files: the bytes of a row's images, their digests, and limits on what a client may send.

A row has paths, URLs, base64, bytes or PIL images. Only a trainer reads them; its servers receive bytes.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from io import BytesIO
from typing import Any

from PIL import Image
from swift.template.vision_utils import load_file

from swift_megatron_grpo.types import Prompt

MAX_PIXELS = 2**26  # of an image that another process sends
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of these


class UnreadableImage(ValueError):
    """An element of a row's column `images` is not an image."""


def images_of(row: Mapping[str, Any]) -> list[Any]:
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
        name = source if isinstance(source, str) else f"{len(source)} bytes"
        if len(name) > 200:
            name = f"{name[:40]}... ({len(name)} characters, read as base64)"
        raise UnreadableImage(f"cannot be read: {name}: {type(error).__name__}") from error
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


def files_of(row: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return digest and content of each image of a row, in order."""
    return [(digest_of(content), content) for content in map(image_bytes, images_of(row))]


def image_digests(prompt: Prompt) -> list[str]:
    return [digest for digest, _ in files_of(prompt.row)]


def check_sent(content: bytes, max_pixels: int, formats: tuple[str, ...] = FORMATS) -> None:
    """Raise ValueError unless a client has sent an image, in one of PIL's `formats`, of at most so many pixels.

    Only its header is read: a file of kilobytes may promise an image of gigabytes.
    """
    try:
        with Image.open(BytesIO(content), formats=formats) as image:
            width, height = image.size
    except Exception:  # whatever PIL raises; its text may repeat the content
        raise ValueError(f"must be an image: {', '.join(formats)}") from None
    if width * height > max_pixels:
        raise ValueError(f"must have at most {max_pixels} pixels")


def portable_images(sources: Iterable[Any]) -> list[str]:
    """Return images as base64 for another machine, where a path would be another file or none."""
    return [b64encode(image_bytes(source)).decode() for source in sources]


def is_portable(source: object) -> bool:
    """Return True if another process has sent an image itself as base64, and not its path or URL."""
    try:
        check_sent(b64decode(source, validate=True), MAX_PIXELS)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True
