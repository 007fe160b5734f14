"""Images of a client: named by digest, bounded in number and size, never a path."""

from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from swift_megatron_grpo.data.images import check_sent
from swift_megatron_grpo.generation.protocol.messages import MISSING_IMAGES, Routes
from swift_megatron_grpo.generation.remote.client import ImageUploads
from swift_megatron_grpo.generation.server.engine_process import ImageStore, MissingImages
from swift_megatron_grpo.generation.server.schema import SCHEMAS, ContentLimits, InvalidBody, parse
from swift_megatron_grpo.runtime.http import Refused

LIMITS = ContentLimits(
    nesting=16, messages=8, prompt_characters=2000, max_model_len=256, vocab_size=300, accepts_media=True, images=2
)


def image(kind: str = "PNG", side: int = 8) -> bytes:
    file = BytesIO()
    Image.new("RGB", (side, side)).save(file, format=kind)
    return file.getvalue()


def test_images_used_last_are_kept_up_to_a_number_of_bytes() -> None:
    store = ImageStore(max_bytes=30)
    for digest in "abc":
        store.put(digest, digest * 10)
    assert store.get("ab") == ["a" * 10, "b" * 10]
    store.put("d", "d" * 10)  # c was not used since
    assert store.get("dab") == ["d" * 10, "a" * 10, "b" * 10]
    with pytest.raises(MissingImages, match=r"2 of the images .* send them again") as missing:
        store.get("acx")
    assert missing.value.status == MISSING_IMAGES
    store.put("b", "b" * 10)  # again: counted once
    assert len(store.get("dab")) == 3
    store.put("e", "e" * 99)  # one image fits in any case
    assert store.get("e") == ["e" * 99]


def test_what_is_sent_is_an_image_of_a_known_format_and_size() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        check_sent(image(kind), 64)
    with pytest.raises(ValueError, match="must have at most 63 pixels"):
        check_sent(image(), 63)
    for content in (b"", b"/etc/passwd", image("PPM"), image()[:20]):
        with pytest.raises(ValueError, match="must be an image: PNG, JPEG") as refused:
            check_sent(content, 64)
        assert "passwd" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "accepts_media", "problem"),
    [
        (image(), True, None),
        (image(), False, "takes text only"),
        (image("JPEG"), True, "must be an image: PNG"),
        (image(side=300), True, "at most 65536 pixels"),
        (b"x" * 2**18, True, "at most 262144 characters"),
        (image()[:-28], True, "is a truncated or damaged image"),
    ],
)
def test_the_image_of_the_text_that_verifies_weights_is_a_small_png(
    content: bytes, accepts_media: bool, problem: str | None
) -> None:
    body = {"tokens": [1, 2], "image": base64.b64encode(content).decode(), "weights_version": 0}
    limits = ContentLimits(16, 8, 2000, 256, 300, accepts_media, images=2)
    if problem is None:
        parse(json.dumps(body).encode(), SCHEMAS[Routes.SCORE], limits)
    else:
        with pytest.raises(InvalidBody, match=f"'image': .*{problem}"):
            parse(json.dumps(body).encode(), SCHEMAS[Routes.SCORE], limits)


@pytest.mark.parametrize("digest", ["a" * 39, "../" + "a" * 37, "A" * 40, 7])
def test_a_request_names_images_by_their_digests(digest: Any) -> None:
    request = {"messages": [{"role": "user", "content": "<image>"}]}
    body = {"request": request, "sampling": {}, "weights_version": 0, "image_digests": ["a" * 40]}
    assert parse(json.dumps(body).encode(), SCHEMAS[Routes.GENERATE], LIMITS).image_digests == ["a" * 40]  # type: ignore[attr-defined]
    with pytest.raises(InvalidBody, match=r"'image_digests\.0'"):
        parse(json.dumps(body | {"image_digests": [digest]}).encode(), SCHEMAS[Routes.GENERATE], LIMITS)
    with pytest.raises(InvalidBody, match=r"'image_digests': more than 2 images .* --vllm_limit_mm_per_prompt"):
        parse(json.dumps(body | {"image_digests": ["a" * 40] * 3}).encode(), SCHEMAS[Routes.GENERATE], LIMITS)


class SlowServer:
    """A server that fails the first upload."""

    def __init__(self) -> None:
        self.received: list[str] = []

    async def put_image(self, digest: str, content: bytes, timeout: float) -> None:
        await asyncio.sleep(0.01)
        self.received.append(digest)
        if len(self.received) == 1:
            raise Refused(503, "not now")


def test_requests_for_an_image_share_one_upload_and_a_failed_one_repeats() -> None:
    async def run() -> list[str]:
        server = SlowServer()
        uploads = ImageUploads(server)  # type: ignore[arg-type]
        first = await asyncio.gather(*(uploads.send({"a": b""}, 1) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(failure, Refused) for failure in first)
        await asyncio.gather(*(uploads.send({"a": b"", "b": b""}, 1) for _ in range(3)))
        await uploads.send({"b": b""}, 1)
        uploads.forget({"b": b""})
        await uploads.send({"a": b"", "b": b""}, 1)
        return server.received

    assert asyncio.run(run()) == ["a", "a", "b", "b"]
