"""Recordings that a client sends to a server: only what a trainer makes of them, bounded in number, never a path."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.server.schema import SCHEMAS, InvalidBody, parse
from tests.unit.data.test_recordings import HEARD, HOSTILE
from tests.unit.generation.server.test_image_store import LIMITS

HEARING = replace(LIMITS, recordings=2)
SENT = base64.b64encode(HEARD).decode()


def generate(**changes: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": "<audio>"}]} | changes.pop("request", {})
    return {"request": request, "sampling": {}, "weights_version": 0, **changes}


def refused(body: dict[str, Any], route: str = Routes.GENERATE, limits: Any = HEARING) -> str:
    with pytest.raises(InvalidBody) as caught:
        parse(json.dumps(body).encode(), SCHEMAS[route], limits)
    return str(caught.value)


def part(source: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "audio", "audio": source}]}]}


def test_what_a_trainer_sends_is_accepted() -> None:
    uri = f"data:audio/wav;base64,{SENT}"

    def accepted(body: dict[str, Any]) -> Any:
        return parse(json.dumps(body).encode(), SCHEMAS[Routes.GENERATE], HEARING)

    assert all(source.endswith(SENT) for source in accepted(generate(request={"audios": [SENT, uri]})).request.audios)
    assert accepted(generate(audio_digests=["a" * 40] * 2)).audio_digests == ["a" * 40] * 2
    assert [*accepted(generate(request=part(uri))).request.messages[0].media] == [("audio", uri)]
    score = {"tokens": [1, 2], "recording": SENT, "weights_version": 0}
    assert parse(json.dumps(score).encode(), SCHEMAS[Routes.SCORE], HEARING).recording == SENT


@pytest.mark.parametrize("name", HOSTILE)
def test_other_content_is_refused_in_every_field(name: str) -> None:
    sent = base64.b64encode(HOSTILE[name]).decode()
    score = {"tokens": [1, 2], "recording": sent, "weights_version": 0}
    for body, route in (
        (generate(request={"audios": [sent]}), Routes.GENERATE),
        (generate(request=part(f"data:audio/wav;base64,{sent}")), Routes.GENERATE),
        (score, Routes.SCORE),
    ):
        assert "must be a recording" in (text := refused(body, route)) or "sent as base64" in text or "at most" in text


@pytest.mark.parametrize("source", ["/etc/passwd", "http://127.0.0.1/a.wav", "file:///etc/passwd", "../a.wav"])
def test_paths_and_urls_are_refused(source: str) -> None:
    for body in (generate(request={"audios": [source]}), generate(request=part(source))):
        assert "media must be sent as base64" in (text := refused(body)) or "must be a recording" in text
        assert "passwd" not in text


def test_their_number_is_limited() -> None:
    assert "more than 2 recordings" in refused(generate(request={"audios": [SENT] * 3}))
    assert "more than 2 recordings" in refused(generate(audio_digests=["a" * 40] * 3))
    assert "more than 0 recordings" in refused(generate(request={"audios": [SENT]}), limits=LIMITS)
    score = {"tokens": [1, 2], "recording": SENT, "weights_version": 0}
    assert "more than 0 recordings" in refused(score, Routes.SCORE, LIMITS)
