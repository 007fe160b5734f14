"""Image files: the bytes of a row's images, their digests, and limits on what a client may send.

A row has paths, URLs, base64, bytes or PIL images. Only a trainer reads them; its servers receive bytes.
"""

from base64 import b64decode, b64encode
from binascii import Error as BinasciiError
from collections.abc import Iterable, Mapping
from copy import deepcopy
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from swift.template.template_inputs import StdTemplateInputs
from swift.template.vision_utils import _check_path, load_file

MAX_PIXELS = 2**26  # of an image that another process sends
MAX_BYTES = 2**26  # of its file, by the default of a server's --max_body_bytes
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of these
TOOL_ROLES = ("tool", "tool_call", "tool_response")  # whose content may be any JSON


class UnreadableImage(ValueError):
    """An element of a row's column `images` is not an image."""


def images_of(row: Mapping[str, Any]) -> list[Any]:
    return list(row.get("images") or [])


def with_listed_images(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose images are all in the column `images`, also those that were parts of its messages.

    ms-swift's template does the same once it encodes the row. Raises ValueError for parts that it cannot encode.
    """
    contents = [message.get("content") for message in row["messages"] if message["role"] not in TOOL_ROLES]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(not isinstance(part, dict) or "type" not in part for part in parts):
        raise ValueError("has a content with a part that has no type; use {'type': 'text', 'text': ...}")
    kinds = {part["type"] for part in parts} - {"text"}
    if not kinds:
        return row
    if not kinds <= {"image", "image_url"}:
        raise ValueError(f"has parts of type {', '.join(sorted(kinds))}; text and images can be trained")
    messages = deepcopy(row["messages"])
    listed = StdTemplateInputs.remove_messages_media(messages)["images"]
    if listed and images_of(row):
        raise ValueError("has images both in its messages and in the column images; use one of the two")
    return {**row, "messages": messages, "images": listed or images_of(row)}


def image_bytes(source: Any) -> bytes:
    """Return the file of an image. A PIL image becomes a PNG, which loses nothing."""
    if isinstance(source, Image.Image):
        file = BytesIO()
        source.save(file, format="PNG")
        return file.getvalue()
    return file_bytes(source, UnreadableImage)


def file_bytes(source: Any, unreadable: type[ValueError]) -> bytes:
    """Return the file of an image, a video or a recording: of a path, a URL or base64, or bytes as they are."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if not source or not isinstance(source, str | bytes):
        raise unreadable(f"is {type(source).__name__}, neither a path, a URL, base64 nor bytes")
    try:
        if isinstance(source, str) and _is_read_as_base64(source):
            b64decode("".join(source.split()), validate=True)
        content: bytes = load_file(source).getvalue()
        return content
    except Exception as error:  # whatever a file system, a download or base64 raises
        raise unreadable(f"cannot be read: {file_name(source)}: {_reason(error)}") from error


def _is_read_as_base64(source: str) -> bool:
    """Return True for what ms-swift decodes because no such file exists; base64 ignores the dot of a file's name."""
    return not source.strip().startswith(("http", "data:")) and _check_path(source.strip()) is None


def _reason(error: Exception) -> str:
    if not isinstance(error, BinasciiError | FileNotFoundError):
        return type(error).__name__
    return f"no such file in {Path.cwd()} or $ROOT_IMAGE_DIR, and not base64"


def file_name(source: object) -> str:
    """Return how an error names a file of a row."""
    if isinstance(source, dict):
        source = source.get("path") or source.get("bytes")
    if not isinstance(source, str):
        return f"{len(source)} bytes" if isinstance(source, bytes) else type(source).__name__
    return source if len(source) <= 200 else f"{source[:40]}... ({len(source)} characters, read as base64)"


def image_size(content: bytes) -> tuple[int, int]:
    """Return width and height, from the header of the file."""
    try:
        with Image.open(BytesIO(content)) as image:
            return image.size
    except Exception as error:
        raise UnreadableImage(f"PIL cannot open: it begins with {content[:16]!r}") from error


def check_whole(content: bytes) -> None:
    """Raise UnreadableImage for a file that is cut off or damaged, which its header does not show.

    The checksums of a PNG are compared. A JPEG is decoded at an eighth of its size, any other format in full.
    """
    image_size(content)
    try:
        with Image.open(BytesIO(content)) as image:
            if image.format == "PNG":
                image.verify()
            else:
                image.draft("RGB", (1, 1))
                image.load()
    except Exception as error:
        raise UnreadableImage(f"is cut off or damaged: {error}") from error


def digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()


def files_of(row: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return digest and content of each image of a row, in order."""
    return [(digest_of(content), content) for content in map(image_bytes, images_of(row))]


def check_sent(
    content: bytes, max_pixels: int, formats: tuple[str, ...] = FORMATS, most_bytes: int | None = None
) -> None:
    """Raise ValueError unless a client has sent an image, in one of PIL's `formats`, of at most so many pixels.

    Only its header is read: a file of kilobytes may promise an image of gigabytes.
    """
    if most_bytes is not None and len(content) > most_bytes:
        raise ValueError(f"must have at most {most_bytes} bytes")
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
