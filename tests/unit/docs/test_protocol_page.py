"""docs/http_protocol.md lists every route, header and status code of the protocol."""

from __future__ import annotations

import re

from swift_megatron_grpo.generation.protocol import messages
from swift_megatron_grpo.generation.protocol.messages import PROTOCOL, RUN_HEADER, RUN_SECRET_HEADER, Routes
from tests.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "http_protocol.md").read_text()
CODES = ("CONFLICT", "CANCELLED", "INVALID", "TAKEN", "MISSING_IMAGES", "ENGINE_GONE")


def test_the_page_lists_every_route() -> None:
    routes = {value.rstrip("/") for name, value in vars(Routes).items() if name.isupper()}
    listed = {route.removesuffix("/<digest>") for route in re.findall(r"^\| `\w+ (/grpo/[^`]*)` ", PAGE, re.MULTILINE)}
    assert listed == routes


def test_the_page_lists_every_status_code() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d{3}) \| ", PAGE, re.MULTILINE)}
    assert listed == {getattr(messages, name) for name in CODES}


def test_the_page_has_the_headers_and_the_version() -> None:
    assert f"now {PROTOCOL})" in PAGE
    assert all(f"`{name}`" in PAGE for name in (RUN_HEADER, RUN_SECRET_HEADER))
