"""Attacks on the address that agents call: keys, bodies and connections."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.generation.conversations import anthropic_chat, chat, proxy
from swift_megatron_grpo.generation.conversations.chat import CallRefused

USER = {"role": "user", "content": "1+1?"}


class Refusing:
    """A rollout that refuses every call."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, call: Any) -> Any:
        self.asked += 1
        raise CallRefused("asked")

    def withdraw(self, call: Any) -> None: ...


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[proxy.Proxy, Refusing, str]]:
    server, rollout = proxy.Proxy(body_seconds=1.0), Refusing()
    with server.serving(rollout) as key:
        yield server, rollout, key


def send(server: proxy.Proxy, head: str, body: bytes = b"", seconds: float = 10.0) -> bytes:
    """Send a request, and return all that arrives before the connection is closed or the time is over."""
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    received = b""
    with closing(socket.create_connection((host, int(port)), timeout=seconds)) as connection:
        try:
            connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
            while part := connection.recv(2**16):
                received += part
        except (TimeoutError, ConnectionError):
            pass
    return received


def post(key: str, length: int | str, path: str = "/v1/chat/completions") -> str:
    return f"POST {path} HTTP/1.1\nHost: x\nAuthorization: Bearer {key}\nContent-Length: {length}\nConnection: close"


VALID = json.dumps({"messages": [USER]}).encode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"messages": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "messages must be a list"),
        (b'{"messages": []}', "messages must be a list"),
        (b'{"messages": [1]}', "a message is not an object"),
        (b'{"messages": [{"role": "root", "content": "a"}]}', "a message has none of the roles"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "a message has none of the roles"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "neither a text nor a list of parts"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "parts that are not texts"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "tool_calls must be a list"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1000000}', "n 1000000 is not supported; use 1"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', "tool_choice"),
        (b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}', "response_"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "tools must be a list of objects"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', "max_tokens must be a positive"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": true}', "max_tokens must be a positive"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}', "stop must be at most 16 texts"),
    ],
)
def test_a_body_that_is_no_call_is_refused(
    served: tuple[proxy.Proxy, Refusing, str], body: bytes, problem: str
) -> None:
    server, rollout, key = served
    before = rollout.asked
    response = send(server, post(key, len(body)), body)
    assert (
        response.startswith(b"HTTP/1.1 400")
        and problem in json.loads(response.split(b"\r\n\r\n")[1])["error"]["message"]
    )
    assert rollout.asked == before


def as_user(*blocks: Any, **more: Any) -> bytes:
    return json.dumps({"max_tokens": 9, "messages": [{"role": "user", "content": list(blocks)}], **more}).encode()


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"7", "not an object"),
        (b"{}", "messages must be a list"),
        (b'{"messages": "a"}', "messages must be a list"),
        (b'{"messages": [7]}', "a message is not an object"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "none of the roles user, assistant"),
        (b'{"messages": [{"role": "user"}]}', "neither a text nor a list of blocks"),
        (as_user(7), "a block is not an object"),
        (as_user({"type": "image"}), "parts that are not texts"),
        (as_user({"type": "tool_result", "content": [{"type": "image"}]}), "parts that are not texts"),
        (as_user({"type": "tool_use", "name": "a", "input": {}}), "a tool_use is in a message that is not the assist"),
        (as_user(TEXT, system=[{"type": "image"}]), "parts that are not texts"),
        (as_user(TEXT, tools=[{"type": "web_search_20250305", "name": "web"}]), "the tool 'web' is one of Anthropic's"),
        (as_user(TEXT, tools={"a": 1}), "tools must be a list of objects"),
        (as_user(TEXT, tool_choice={"type": "any"}), "tool_choice 'any' is not supported; use 'auto'"),
        (as_user(TEXT, tool_choice="auto"), "tool_choice is not an object"),
        (as_user(TEXT, output_config={"format": {"type": "json_schema"}}), "response_format"),
        (as_user(TEXT, mcp_servers=[{}]), "mcp_servers is not supported; leave it out"),
        (as_user(TEXT, max_tokens=0), "max_tokens must be a positive number"),
        (as_user(TEXT, stop_sequences=["a"] * 17), "stop must be at most 16 texts"),
        (
            b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": "{}"}]}]}',
            "the input of a tool_use is not an object",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 7, "input": {}}]}]}',
            "tool_calls must be a list of objects with a function",
        ),
    ],
)
def test_a_body_that_is_none_of_anthropics_is_refused(
    served: tuple[proxy.Proxy, Refusing, str], body: bytes, problem: str
) -> None:
    server, rollout, key = served
    before = rollout.asked
    response = send(server, post(key, len(body), "/v1/messages"), body)
    assert response.startswith(b"HTTP/1.1 400") and rollout.asked == before
    error = json.loads(response.split(b"\r\n\r\n")[1])
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert problem in error["error"]["message"]


@pytest.mark.parametrize("key", ["", "guess", "é", "x" * 5000])
def test_a_wrong_key_is_refused_before_the_body_is_read(served: tuple[proxy.Proxy, Refusing, str], key: str) -> None:
    server, rollout, _ = served
    before = rollout.asked
    began = time.monotonic()
    response = send(server, post(key, 1000))  # no body follows
    assert response.startswith(b"HTTP/1.1 401") and time.monotonic() - began < 5 and rollout.asked == before


@pytest.mark.parametrize("scheme", ["", "Basic ", "bearer"])
def test_a_key_without_its_scheme_is_refused(served: tuple[proxy.Proxy, Refusing, str], scheme: str) -> None:
    server, _, key = served
    head = post("", len(VALID)).replace("Authorization: Bearer ", f"Authorization: {scheme}{key}")
    assert send(server, head, VALID).startswith(b"HTTP/1.1 401")


def test_anthropics_header_has_the_key_alone(served: tuple[proxy.Proxy, Refusing, str]) -> None:
    server, _, key = served
    head = post("", len(VALID), "/v1/messages").replace("Authorization: Bearer ", f"x-api-key: {key}")
    assert b"asked" in send(server, head, VALID)
    refused = send(server, head.replace(key, f"Bearer {key}"), VALID)
    assert refused.startswith(b"HTTP/1.1 401") and b"authentication_error" in refused


def test_an_oversized_body_is_refused_announced_or_not(served: tuple[proxy.Proxy, Refusing, str]) -> None:
    server, rollout, key = served
    before = rollout.asked
    size = proxy.BODY_BYTES + 10
    assert send(server, post(key, size), b" " * size).startswith(b"HTTP/1.1 413")
    chunked = post(key, 0).replace("Content-Length: 0", "Transfer-Encoding: chunked")
    assert send(server, chunked, f"{size:x}\r\n".encode() + b" " * size + b"\r\n0\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert rollout.asked == before


def test_a_slow_client_is_refused_and_holds_no_other_back(served: tuple[proxy.Proxy, Refusing, str]) -> None:
    server, rollout, key = served
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as silent_one:
        silent_one.sendall(b"POST /v1/chat")
        with closing(socket.create_connection((host, int(port)), timeout=10)) as slow:
            slow.sendall(post(key, 100).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
            before = rollout.asked
            began = time.monotonic()
            assert b"asked" in send(server, post(key, len(VALID)), VALID) and rollout.asked == before + 1
            assert time.monotonic() - began < 0.9
            assert b"the body did not arrive in time" in slow.recv(2**16)


def test_connections_beyond_a_number_are_closed(
    served: tuple[proxy.Proxy, Refusing, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, key = served
    monkeypatch.setattr(proxy, "MOST_CONNECTIONS", 0)
    assert send(server, post(key, len(VALID)), VALID) == b""
    monkeypatch.undo()
    assert b"asked" in send(server, post(key, len(VALID)), VALID)


def test_only_this_machine_can_connect(served: tuple[proxy.Proxy, Refusing, str]) -> None:
    assert served[0].url.startswith("http://127.0.0.1:")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("messages", "n", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream", "model",
         "response_format", "logit_bias", "functions", "system", "stop_sequences", "output_config")  # fmt: skip
PARTS = ("type", "text", "id", "name", "input", "tool_use_id", "content")
kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])
parts = st.fixed_dictionaries({"type": kinds | anything}, optional={name: anything for name in PARTS[1:]})
roles = st.sampled_from(["user", "assistant", "tool"])
messages = st.fixed_dictionaries(
    {"role": roles | anything, "content": st.lists(parts, max_size=3) | anything},
    optional={name: anything for name in ("tool_calls", "tool_call_id", "name")},
)


@pytest.mark.parametrize("dialect", [chat, anthropic_chat])
@given(st.dictionaries(st.sampled_from(NAMES), anything), st.lists(messages, max_size=3) | anything)
def test_any_body_is_a_call_or_refused(dialect: proxy.Dialect, body: dict[str, Any], given_messages: Any) -> None:
    try:
        call = dialect.parse(json.dumps({**body, "messages": given_messages}).encode())
    except CallRefused as refusal:
        assert refusal.status == 400 and json.dumps(dialect.refusal_json(refusal))
        return
    assert call.messages and all(isinstance(message["content"], str) for message in call.messages)
    assert call.max_tokens is None or call.max_tokens > 0
