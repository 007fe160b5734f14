"""This package's routes: a batch meets the weights that it was sent for, and one run at a time holds the lease."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.requests import Request
from swift.utils import get_logger

from swift_megatron_grpo.data.images import digest_of
from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    INVALID,
    NO_WEIGHTS,
    RUN_IDLE_SECONDS,
    TAKEN,
    RunIdentity,
)
from swift_megatron_grpo.generation.server.gate import _BODY
from swift_megatron_grpo.generation.server.health import EngineHealth
from swift_megatron_grpo.generation.server.routes import RolloutRoutes, RunLease
from swift_megatron_grpo.generation.server.schema import (
    ContentLimits,
    GenerateBatch,
    InvalidBody,
    JoinRequest,
    ReceiveRequest,
    parse,
)
from tests.unit.data import test_videos
from tests.unit.data.test_recordings import HEARD, HOSTILE

LIMITS = ContentLimits(8, 8, 1000, 64, 100, accepts_media=False, images=0)
RUN = RunIdentity("run", "secret")
REQUEST = {
    "request": {"messages": [{"role": "user", "content": "hello"}]}, "sampling": {"max_tokens": 4}, "weights_version": 3
}  # fmt: skip


class Engine:
    """Answers every command at once."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.commands.append(command)
        return {"text": "hi"}


class BrokenEngine(Engine):
    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        raise RuntimeError("a secret of the server")


def served(engine: Engine) -> RolloutRoutes:
    """Return the routes of a server with weights 3, without its processes."""
    arguments: Any = SimpleNamespace(host="127.0.0.1", world_size=1, drafts=4)
    commands: Any = engine
    routes = RolloutRoutes(arguments, commands, EngineHealth(lambda: engine.call("probe"), 60), engine_settings={})
    routes._lease.touch(RUN, time.monotonic())
    routes.weights_version = 3
    return routes


async def answers(server: RolloutRoutes, arrives: int | None) -> list[dict[str, Any]]:
    """Send a batch of two. `arrives`: version of weights that arrive after the batch was accepted; None: no weights."""
    scope = {"type": "http", _BODY: parse(json.dumps({"requests": [REQUEST] * 2}).encode(), GenerateBatch, LIMITS)}
    response = await server.generate_batch(Request(scope), RUN)
    if arrives is not None:
        server.weights_version = arrives
    lines = [line async for chunk in response.body_iterator for line in chunk.splitlines()]
    return sorted(map(json.loads, lines), key=lambda answer: answer["place"])


def test_each_request_is_answered_with_the_completion_of_the_engine() -> None:
    engine = Engine()
    first, second = asyncio.run(answers(served(engine), arrives=None))
    assert first["completion"] == second["completion"] == {"text": "hi"}
    assert engine.commands == ["generate", "generate"]


def test_a_request_for_these_weights_or_newer_ones_gets_no_older_ones() -> None:
    server = served(Engine())
    for version in (4, NO_WEIGHTS):
        server.weights_version = version
        with pytest.raises(HTTPException) as refused:
            server._require_weights(RUN, 3)
        assert refused.value.status_code == CONFLICT
    server.weights_version = 4
    server._require_weights(RUN, 3, or_newer=True)
    for version in (2, NO_WEIGHTS):
        server.weights_version = version
        with pytest.raises(HTTPException):
            server._require_weights(RUN, 3, or_newer=True)


class RefusingEngine(Engine):
    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        raise HTTPException(500, "the weights did not arrive")


async def send(server: RolloutRoutes, version: int, run: RunIdentity = RUN, in_flight: bool = True) -> None:
    server._joining = asyncio.create_task(Engine().call("join"))
    body = {"version": version, "lora": False, "collect_checksums": False, "in_flight": in_flight}
    parsed = parse(json.dumps(body).encode(), ReceiveRequest, LIMITS)
    await server.receive(Request({"type": "http", _BODY: parsed}), run)


def test_a_server_has_its_weights_until_newer_ones_arrive_in_flight() -> None:
    seen: list[int] = []

    class Watching(Engine):
        async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
            seen.append(server.weights_version)
            return await super().call(command, **arguments)

    server = served(Watching())
    server._engine_settings = {"status": {"updates_in_flight": True}}
    asyncio.run(send(server, 5))
    assert seen == [3] and server.weights_version == 5
    asyncio.run(send(server, 6, in_flight=False))
    assert seen == [3, NO_WEIGHTS] and server.weights_version == 6


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"version": 3}, CONFLICT, "this server has weights 3, and 3 cannot follow them"),
        ({"version": 2}, CONFLICT, "this server has weights 3, and 2 cannot follow them"),
        ({"run": RunIdentity("run", "guessed")}, TAKEN, "it serves another run"),
        ({"weights_version": NO_WEIGHTS}, CONFLICT, "this server has weights -1, and 4 cannot follow them"),
        ({"updates_in_flight": False}, INVALID, "this server's engine loads weights only while idle"),
        ({"engine": RefusingEngine()}, 500, "the weights did not arrive"),
    ],
)
def test_weights_in_flight_that_cannot_follow_change_nothing(
    changes: dict[str, Any], status: int, message: str
) -> None:
    """But weights that arrived in part leave the server without weights."""
    engine = changes.get("engine", Engine())
    server = served(engine)
    server._engine_settings = {"status": {"updates_in_flight": changes.get("updates_in_flight", True)}}
    before = server.weights_version = changes.get("weights_version", 3)
    with pytest.raises(HTTPException, match=message) as refused:
        asyncio.run(send(server, changes.get("version", 4), changes.get("run", RUN)))
    assert refused.value.status_code == status and engine.commands == []
    assert server.weights_version == (NO_WEIGHTS if status == 500 else before)


def test_an_adapter_is_not_received_in_flight() -> None:
    body = {"version": 4, "lora": True, "collect_checksums": False, "in_flight": True}
    with pytest.raises(InvalidBody, match="in_flight is for the model's weights"):
        parse(json.dumps(body).encode(), ReceiveRequest, LIMITS)


def test_weights_that_arrive_before_a_request_reaches_the_engine_refuse_it() -> None:
    for arrives in (NO_WEIGHTS, 4):
        engine = Engine()
        refusals = asyncio.run(answers(served(engine), arrives))
        assert [answer["status"] for answer in refusals] == [CONFLICT, CONFLICT] and engine.commands == []


def test_a_request_of_a_batch_that_fails_has_a_number_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.ERROR):
        refusals = asyncio.run(answers(served(BrokenEngine()), arrives=None))
    get_logger().removeHandler(caplog.handler)
    for refusal in refusals:
        [number] = re.findall(r"as error (\w{8})$", refusal["detail"])
        assert refusal["status"] == 500 and "secret" not in refusal["detail"]
        assert f"error {number} in a request of a batch" in caplog.text and "a secret of the server" in caplog.text


@pytest.mark.parametrize(("engine", "listens"), [(Engine(), True), (BrokenEngine(), False)])
def test_a_rendezvous_that_has_failed_is_closed(engine: Engine, listens: bool) -> None:
    async def port() -> int:
        body = parse(b'{"host": "127.0.0.1", "port": 0, "timeout": 60.0}', JoinRequest, LIMITS)
        joined = await server.join(Request({"type": "http", _BODY: body}), RUN)
        await asyncio.wait([server._joining])
        return int(joined["port"])

    server = served(engine)
    with socket.socket() as stranger:
        assert (stranger.connect_ex(("127.0.0.1", asyncio.run(port()))) == 0) is listens


def test_checksums_are_read_only_after_a_load_that_collected_them() -> None:
    """The workers would fail."""
    engine = Engine()
    server = served(engine)
    with pytest.raises(HTTPException, match="collect_checksums") as refused:
        asyncio.run(server.held_weights(RUN))
    assert refused.value.status_code == CONFLICT and engine.commands == []

    async def receive(collect_checksums: bool) -> None:
        server._joining = asyncio.create_task(engine.call("join"))
        body = parse(
            json.dumps({"version": 4, "lora": False, "collect_checksums": collect_checksums}).encode(),
            ReceiveRequest,
            LIMITS,
        )
        await server.receive(Request({"type": "http", _BODY: body}), RUN)

    asyncio.run(receive(False))
    with pytest.raises(HTTPException):
        asyncio.run(server.held_weights(RUN))
    asyncio.run(receive(True))
    assert asyncio.run(server.held_weights(RUN)) == {"text": "hi"}


A, B = RunIdentity("a", "secret of a"), RunIdentity("b", "secret of b")


def test_a_run_holds_the_lease_until_it_is_idle_for_too_long() -> None:
    lease = RunLease()
    assert lease.holder(5.0) is None and not lease.is_held_by(A) and not lease.is_held_by(None)
    assert not lease.touch(None, 100.0)  # a client without a run, such as a person who reads the status
    assert lease.touch(A, 100.0) and lease.holder(100.0) == "a"
    assert not lease.touch(B, 101.0) and not lease.touch(None, 101.0)
    end = 100.0 + RUN_IDLE_SECONDS
    assert lease.holder(end - 0.1) == "a" and lease.holder(end) is None
    assert not lease.touch(A, end + 1)  # no other run has acquired the lease: the weights are still its own
    assert lease.holder(end + 1) == "a" and lease.is_held_by(A) and not lease.is_held_by(B)


def test_the_first_request_after_expiry_acquires_the_lease() -> None:
    lease = RunLease()
    assert lease.touch(A, 100.0) and lease.touch(B, 100.0 + RUN_IDLE_SECONDS)
    assert not lease.touch(A, 101.0 + RUN_IDLE_SECONDS)
    assert lease.holder(101.0 + RUN_IDLE_SECONDS) == "b" and not lease.is_held_by(A)
    assert lease.touch(A, 100.0 + 2 * RUN_IDLE_SECONDS) and lease.is_held_by(A)


def test_a_released_lease_can_be_acquired_at_once() -> None:
    lease = RunLease()
    assert lease.touch(A, 100.0)
    lease.release(B)
    lease.release(None)
    assert lease.holder(101.0) == "a"
    lease.release(A)
    assert lease.holder(101.0) is None and lease.touch(B, 101.0)


def test_the_name_of_a_run_neither_releases_its_lease_nor_prolongs_it() -> None:
    """The status shows the name, so every client with the key has it."""
    lease, impostor = RunLease(), RunIdentity("a", "guessed")
    assert lease.touch(A, 100.0) and not lease.is_held_by(impostor)
    lease.release(impostor)
    assert lease.holder(101.0) == "a" and "secret" not in repr(A)
    assert not lease.touch(impostor, 100.0 + RUN_IDLE_SECONDS - 1)
    assert lease.holder(100.0 + RUN_IDLE_SECONDS) is None
    assert lease.touch(impostor, 101.0 + RUN_IDLE_SECONDS) and not lease.is_held_by(A)  # as any other run


def upload(content: bytes, engine: Engine) -> None:
    """Put the content under its digest on a server whose model takes media."""
    server = served(engine)
    server._engine_settings = {"accepts_media": True}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    asyncio.run(server.put_image(digest_of(content), Request({"type": "http"}, receive), RUN))


@pytest.mark.parametrize("content", [HEARD, test_videos.GOOD], ids=["recording", "video"])
def test_recordings_and_videos_are_kept_as_a_trainer_sends_them(content: bytes) -> None:
    upload(content, engine := Engine())
    assert engine.commands == ["put_image"]


HOSTILE_FILES = {f"audio {name}": content for name, content in HOSTILE.items()}
# A PNG is an image, if it is whole; the route does not decode it.
HOSTILE_FILES |= {f"video {name}": content for name, content in test_videos.HOSTILE.items() if name != "a PNG"}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_any_other_audio_or_video_is_refused_when_it_is_sent(name: str) -> None:
    engine = Engine()
    with pytest.raises(HTTPException, match="the body must ") as refused:
        upload(HOSTILE_FILES[name], engine)
    assert refused.value.status_code == 422 and engine.commands == []


def test_counts_of_drafts_are_for_the_run_that_has_the_server() -> None:
    engine = Engine()
    server = served(engine)
    asyncio.run(server.take_draft_counts(RUN))
    assert engine.commands == ["take_draft_counts"]
    with pytest.raises(HTTPException) as refused:
        asyncio.run(server.take_draft_counts(RunIdentity("another", "secret")))
    assert refused.value.status_code == TAKEN


def test_a_server_without_drafts_has_no_counts_of_them() -> None:
    server = served(Engine())
    server._args.drafts = 0
    with pytest.raises(HTTPException, match="verifies no drafts") as refused:
        asyncio.run(server.take_draft_counts(RUN))
    assert refused.value.status_code == INVALID
