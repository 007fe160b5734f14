"""Reward models behind servers: scores in order, faults that pass, and hostile answers that end or cost a completion.

The peers are real HTTP servers, and the server is called as every reward function is.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swift_megatron_grpo.grading.reward_servers import AT_ONCE, RewardServer, RewardServerFailure
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, ScoreRows, call_reward_functions
from swift_megatron_grpo.settings.reward_models import CLASSIFY, JUDGE, POOLING
from tests.unit.grading.test_rewards import make_rollouts

Reply = Callable[["Handler", dict[str, Any]], None]

# Seconds that a peer may take which never answers. A good answer has to arrive in them on a busy machine, too.
PATIENCE = 4


class Grader:
    """The plugin of a judge: asks for a number, unless a completion is empty."""

    def request(self, row: dict[str, Any]) -> dict[str, Any] | None:
        text = row["messages"][-1]["content"]
        return {"messages": [{"role": "user", "content": f"Grade: {text}"}], "max_tokens": 8} if text else None

    def score(self, text: str) -> float | None:
        return None if text == "none" else float(text)


class Peer(ThreadingHTTPServer):
    """A server with good answers, but to completions with the word "bad", or where `to_next` returns another one."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.to_bad: Reply | None = None
        self.to_next: Callable[[], Reply | None] = lambda: None
        self.together = 0  # answers wait until so many are asked at once, and then for more
        self.lock = threading.Condition()
        self.busy = self.most_busy = self.asked = 0
        self.keys: set[str | None] = set()

    def caller(self, route: str = CLASSIFY, drops: bool = False, timeout: float = 20) -> RewardServer:
        address = f"http://127.0.0.1:{self.server_address[1]}{route}"
        return RewardServer(address, route, Grader() if route == JUDGE else None, timeout, drops, "a key")


class Handler(BaseHTTPRequestHandler):
    server: Peer

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def send(self, content: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client may have gone
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.send(json.dumps({"data": [{"id": "judge"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "judge" and self.headers["Authorization"] == "Bearer a key"
        peer, text = self.server, body["messages"][-1]["content"]
        with peer.lock:
            peer.asked += 1
            peer.busy += 1
            peer.most_busy = max(peer.most_busy, peer.busy)
            peer.lock.notify_all()
            peer.lock.wait_for(lambda: peer.most_busy >= peer.together, timeout=15)
        time.sleep(0.2 if peer.together else 0)
        with peer.lock:
            peer.busy -= 1
            reply = peer.to_bad if "bad" in text else peer.to_next()
        (reply or good)(self, body)


def good(handler: Handler, body: dict[str, Any]) -> None:
    """Score a completion by its length."""
    text = body["messages"][-1]["content"].removeprefix("Grade: ")
    answers: dict[str, Any] = {
        CLASSIFY: {"data": [{"index": 0, "probs": [float(len(text))], "num_classes": 1}]},
        POOLING: {"data": [{"index": 0, "data": [[float(len(text))]]}]},
        JUDGE: {"choices": [{"message": {"content": f" {len(text)}\n"}}]},
    }
    assert handler.path == JUDGE or body["use_activation"] is False
    handler.send(json.dumps(answers[handler.path]).encode())


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def call(server: RewardServer, texts: list[str]) -> ScoreRows:
    rewards = RewardFunctions(["model"], [server])
    return call_reward_functions(make_rollouts(texts), rewards, None, drop_failing=server.drops)


@pytest.mark.parametrize("route", [CLASSIFY, POOLING, JUDGE])
def test_every_completion_gets_its_own_score_and_64_are_asked_at_once(peer: Peer, route: str) -> None:
    texts = ["x" * (1 + number % 50) for number in range(3 * AT_ONCE)]
    peer.caller(route).check()
    asked, peer.together = peer.asked, AT_ONCE
    assert call(peer.caller(route), texts) == [[float(len(text))] for text in texts]
    assert peer.asked == asked + len(texts) and peer.most_busy == AT_ONCE == 64 and peer.keys == {"Bearer a key"}


def test_a_judge_that_does_not_apply_to_a_completion_is_not_asked(peer: Peer) -> None:
    assert call(peer.caller(JUDGE), ["abc", ""]) == [[3.0], [None]] and peer.asked == 1


def die(handler: Handler, body: dict[str, Any]) -> None:
    """Break the connection in the middle of an answer."""
    handler.send(b'{"data": [', length=1000)
    handler.connection.shutdown(socket.SHUT_RDWR)


def close_half(handler: Handler, body: dict[str, Any]) -> None:
    """Send a part of an answer and end the sending side, but keep the receiving one."""
    handler.send(b'{"data": [', length=1000)
    handler.connection.shutdown(socket.SHUT_WR)
    time.sleep(PATIENCE + 2)


def say_nothing(handler: Handler, body: dict[str, Any]) -> None:
    time.sleep(PATIENCE + 2)


def drip(handler: Handler, body: dict[str, Any]) -> None:
    handler.send(b"", length=1000)
    for _ in range(10 * (PATIENCE + 2)):
        time.sleep(0.1)
        with suppress(OSError):
            handler.wfile.write(b" ")


def redirect(handler: Handler, body: dict[str, Any]) -> None:
    handler.send(b"", status=307, Location=handler.path)


def answer(content: Any, status: int = 200) -> Reply:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda handler, _: handler.send(data, status=status)


def probs(*values: Any) -> Reply:
    return answer({"data": [{"probs": list(values)}]})


def says(text: Any) -> Reply:
    return answer({"choices": [{"message": {"content": text}}]})


HOSTILE: dict[str, tuple[str, Reply, str]] = {
    "down": (CLASSIFY, answer(b"", status=503), r"after \d tries in 4 s \(--reward_model_timeout\): HTTP 503"),
    "dies": (CLASSIFY, die, r"after \d tries in 4 s .*Unreachable|after \d tries in 4 s .*ClientPayloadError"),
    "half-closed": (JUDGE, close_half, r"after \d tries in 4 s "),
    "never answers": (CLASSIFY, say_nothing, r"in 4 s .*no response within 4 s"),
    "drips": (CLASSIFY, drip, r"after \d tries in 4 s "),
    "redirects": (CLASSIFY, redirect, "HTTP 307"),
    "refuses": (CLASSIFY, answer({"detail": "too long"}, status=400), "HTTP 400: too long"),
    "not JSON": (CLASSIFY, answer(b"<html>"), "not valid JSON"),
    "nested": (CLASSIFY, answer(b"[" * 50000), "not valid JSON"),
    "a list": (JUDGE, answer([1]), "not a JSON object"),
    "huge": (CLASSIFY, answer(b'{"data": "' + b"x" * 2**23 + b'"}'), "has more than 4194304 bytes"),
    "empty": (CLASSIFY, answer({}), "KeyError: 'data'"),
    "no entry": (CLASSIFY, answer({"data": []}), "not enough values"),
    "two entries": (CLASSIFY, answer({"data": [{"probs": [1.0]}] * 2}), "too many values"),
    "no text": (CLASSIFY, answer({"data": ["abc"]}), "its answer is not that of one text: TypeError"),
    "two classes": (CLASSIFY, probs(0.1, 0.9), "returns 2 numbers for a completion"),
    "no class": (POOLING, answer({"data": [{"data": []}]}), "returns 0 numbers"),
    "nan": (CLASSIFY, probs(math.nan), "its answer is nan"),
    "infinite": (POOLING, answer({"data": [{"data": [-math.inf]}]}), "its answer is -inf"),
    "huge number": (CLASSIFY, probs(10**400), "its answer is inf"),
    "a text": (CLASSIFY, probs("1"), "its answer is '1', not a number"),
    "true": (CLASSIFY, probs(True), "its answer is True, not a number"),
    "judge without choices": (JUDGE, answer({"choices": []}), "its answer has not one choice"),
    "judge with two": (JUDGE, answer({"choices": [{"message": {"content": "1"}}] * 2}), "has not one choice"),
    "judge with null": (JUDGE, says(None), "its answer is None, not a text"),
    "judge in words": (JUDGE, says("great"), "`score` of the plugin Grader raises ValueError"),
    "judge without a score": (JUDGE, says("none"), "for 'none', is None, not a number"),
    "judge with nan": (JUDGE, says("nan"), "is nan"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_ends_clearly_or_costs_its_completion(
    peer: Peer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    route, peer.to_bad, message = HOSTILE[case]
    timeout = PATIENCE if "in 4 s" in message else 60
    texts = ["a", "bad one", "ccc"]
    with pytest.raises(RewardError, match=message) as failure:
        call(peer.caller(route, timeout=timeout), texts)
    assert f"--reward_model http://127.0.0.1:{peer.server_address[1]}{route}: " in str(failure.value)
    assert "for the completion 'bad one'" in str(failure.value) and len(str(failure.value)) < 2500
    [first], [second], [third] = call(peer.caller(route, drops=True, timeout=timeout), texts)
    assert (first, third) == (1.0, 3.0) and second is not None and math.isnan(second)
    assert "--bad_reward drop leaves 1 of 3 completions out" in caplog.text


@pytest.mark.parametrize("fault", [die, answer(b"", status=502)], ids=["dies", "busy"])
def test_a_fault_that_passes_costs_no_completion(peer: Peer, fault: Reply) -> None:
    def fail_once(handler: Handler, body: dict[str, Any]) -> None:
        peer.to_bad = None
        fault(handler, body)

    peer.to_bad = fail_once
    assert call(peer.caller(), ["a", "bad", "ccc"]) == [[1.0], [3.0], [3.0]] and peer.asked == 4


def test_a_server_that_is_down_ends_the_start_or_drops_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}{CLASSIFY}"
    with pytest.raises(RewardServerFailure, match=r"after \d tries in 4 s \(--reward_model_timeout\): Client"):
        RewardServer(address, CLASSIFY, None, PATIENCE, drops=False).check()
    dropping = RewardServer(address, CLASSIFY, None, PATIENCE, drops=True)
    assert all(math.isnan(score or 0.0) for [score] in call(dropping, ["a", "b"]))
    assert "--bad_reward drop leaves its batch out" in caplog.text


def test_a_plugin_that_fails_to_ask_is_named(peer: Peer) -> None:
    class Broken(Grader):
        def request(self, row: dict[str, Any]) -> dict[str, Any] | None:
            return {"messages": row["question"]}

    server = RewardServer(peer.caller(JUDGE).address, JUDGE, Broken(), 20, drops=False)
    with pytest.raises(RewardError, match="reward function model raised KeyError: 'question'"):
        call(server, ["a", "b"])
