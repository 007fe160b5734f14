"""Videos that a client sends to a server: only frames that a trainer has chosen, bounded in number, never a path."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.server.schema import SCHEMAS, InvalidBody, parse
from tests.unit.data.test_videos import GOOD, HOSTILE
from tests.unit.generation.server.test_image_store import LIMITS

WATCHING = replace(LIMITS, videos=2)
SENT = base64.b64encode(GOOD).decode()


def generate(**changes: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": "<video>"}]} | changes.pop("request", {})
    return {"request": request, "sampling": {}, "weights_version": 0, **changes}


def refused(body: dict[str, Any], route: str = Routes.GENERATE, limits: Any = WATCHING) -> str:
    with pytest.raises(InvalidBody) as caught:
        parse(json.dumps(body).encode(), SCHEMAS[route], limits)
    return str(caught.value)


def part(source: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "video", "video": source}]}]}


def test_what_a_trainer_sends_is_accepted() -> None:
    uri = f"data:video/frames;base64,{SENT}"

    def accepted(body: dict[str, Any]) -> Any:
        return parse(json.dumps(body).encode(), SCHEMAS[Routes.GENERATE], WATCHING)

    assert all(source.endswith(SENT) for source in accepted(generate(request={"videos": [SENT, uri]})).request.videos)
    assert accepted(generate(video_digests=["a" * 40] * 2)).video_digests == ["a" * 40] * 2
    assert [*accepted(generate(request=part(uri))).request.messages[0].media] == [("video", uri)]
    score = {"tokens": [1, 2], "video": SENT, "weights_version": 0}
    assert parse(json.dumps(score).encode(), SCHEMAS[Routes.SCORE], WATCHING).video == SENT


@pytest.mark.parametrize("name", HOSTILE)
def test_other_content_is_refused_in_every_field(name: str) -> None:
    sent = base64.b64encode(HOSTILE[name]).decode()
    score = {"tokens": [1, 2], "video": sent, "weights_version": 0}
    for body, route in (
        (generate(request={"videos": [sent]}), Routes.GENERATE),
        (generate(request=part(f"data:video/frames;base64,{sent}")), Routes.GENERATE),
        (score, Routes.SCORE),
    ):
        assert "must " in (text := refused(body, route)) or "sent as base64" in text or "at most" in text


@pytest.mark.parametrize("source", ["/etc/passwd", "http://127.0.0.1/a.mp4", "file:///etc/passwd", "../a.mp4"])
def test_paths_and_urls_are_refused(source: str) -> None:
    for body in (generate(request={"videos": [source]}), generate(request=part(source))):
        assert "media must be sent as base64" in (text := refused(body)) or "must " in text
        assert "passwd" not in text


def test_their_number_is_limited() -> None:
    assert "more than 2 videos" in refused(generate(request={"videos": [SENT] * 3}))
    assert "more than 2 videos" in refused(generate(video_digests=["a" * 40] * 3))
    assert "more than 0 videos" in refused(generate(request={"videos": [SENT]}), limits=LIMITS)
    score = {"tokens": [1, 2], "video": SENT, "weights_version": 0}
    assert "more than 0 videos" in refused(score, Routes.SCORE, LIMITS)
