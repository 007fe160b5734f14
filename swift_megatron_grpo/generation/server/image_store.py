"""Images that a trainer has sent to this server, by digest: each is sent once and named by several requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swift_megatron_grpo.generation.protocol.messages import MISSING_IMAGES
from swift_megatron_grpo.generation.server.pipe import InvalidRequest


class MissingImages(InvalidRequest):
    """An image that the request names is not here; the client sends it again."""

    status = MISSING_IMAGES


class ImageStore:
    """Keeps the images that were used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, str] = OrderedDict()  # base64, as ms-swift's requests take it
        self._bytes = 0

    def put(self, digest: str, image: str) -> None:
        self._bytes += len(image) - len(self._images.pop(digest, ""))
        self._images[digest] = image
        while self._bytes > self._max_bytes and len(self._images) > 1:
            self._bytes -= len(self._images.popitem(last=False)[1])

    def get(self, digests: Sequence[str]) -> list[str]:
        """Return images in order. Raises MissingImages if any was never sent, or has had to make room."""
        missing = [digest for digest in digests if digest not in self._images]
        if missing:
            raise MissingImages(f"{len(missing)} of the images that the request names are not here; send them again")
        for digest in digests:
            self._images.move_to_end(digest)
        return [self._images[digest] for digest in digests]
