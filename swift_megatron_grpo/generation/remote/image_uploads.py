"""Images on their way to one server: each is sent once, however many requests name it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from swift_megatron_grpo.generation.remote.client import Client


class ImageUploads:
    """The images that a server has been sent."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sent: dict[str, asyncio.Task[None]] = {}  # by digest

    async def send(self, files: Mapping[str, bytes], timeout: float) -> None:
        """Send what has not been sent. Requests that need the same image wait for one upload."""
        for digest, content in files.items():
            if digest not in self._sent:
                self._sent[digest] = asyncio.create_task(self._client.put_image(digest, content, timeout))
        for digest in files:
            upload = self._sent.get(digest)
            if upload is None:
                continue
            try:
                await asyncio.shield(upload)
            finally:
                if upload.done() and (upload.cancelled() or upload.exception() is not None):
                    self._sent.pop(digest, None)

    def forget(self, files: Mapping[str, bytes]) -> None:
        """Send these images again when they are needed: the server does not have them."""
        for digest in files:
            self._sent.pop(digest, None)
