"""A teacher's server: its answers are read, its faults cost no text, and hostile answers end clearly."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swift_megatron_grpo.generation.remote.teacher import TeacherFailure, TeacherServer, score_together
from swift_megatron_grpo.loop.served_teacher import ServedTeacher
from swift_megatron_grpo.types import Sample
from tests.fakes.ranks import OneRank

Reply = Callable[[BaseHTTPRequestHandler, list[int]], None]
TEXT = [5, 6, 7, 8]


def entries(tokens: list[int], shift: float = 0.0) -> list[Any]:
    """Return what vLLM sends: no entry for the first token, for each other one its log-prob."""
    scored = [{str(token): {"logprob": -token / 10 + shift, "decoded_token": chr(90 + token)}} for token in tokens[1:]]
    return [None, *scored]


def send(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    with suppress(OSError):  # the client may have gone
        handler.wfile.write(content)


def answer(choice: Any) -> Reply:
    """Send this in place of the log-probs; a text or bytes in place of the whole response."""
    content = choice if isinstance(choice, bytes) else json.dumps({"choices": [{"prompt_logprobs": choice}]}).encode()
    return lambda handler, tokens: send(handler, content)


def good(handler: BaseHTTPRequestHandler, tokens: list[int]) -> None:
    send(handler, json.dumps({"choices": [{"prompt_logprobs": entries(tokens)}]}).encode())


def die(handler: BaseHTTPRequestHandler, tokens: list[int]) -> None:
    """Break the connection in the middle of a response."""
    send(handler, b'{"choices": [', length=1000)
    handler.connection.shutdown(socket.SHUT_RDWR)


def busy(handler: BaseHTTPRequestHandler, tokens: list[int]) -> None:
    send(handler, b'{"detail": "loading"}', status=503)


class Peer(ThreadingHTTPServer):
    """A server with planned replies; once they are used up, it gives good ones."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait; by default 5, and 64 come at once
    longest: Any = 100

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.planned: list[Reply] = []
        self.asked = 0

    def teacher(self, timeout: float = 20) -> TeacherServer:
        return TeacherServer(f"http://127.0.0.1:{self.server_address[1]}", timeout)


class Handler(BaseHTTPRequestHandler):
    server: Peer

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        send(self, json.dumps({"data": [{"id": "big", "max_model_len": self.server.longest}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "big" and body["prompt_logprobs"] == 0
        self.server.asked += 1
        reply = self.server.planned.pop(0) if self.server.planned else good
        reply(self, body["prompt"])


@contextmanager
def serving() -> Iterator[Peer]:
    with Peer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving() as server:
        yield server


def shifted(shift: float) -> Reply:
    return lambda handler, tokens: answer(entries(tokens, shift))(handler, tokens)


def test_the_tag_of_a_sample_picks_its_teacher(peer: Peer) -> None:
    """Samples of two teachers alternate, and one is not trained; the completion of each has two tokens."""
    with serving() as other:
        peer.planned, other.planned = [shifted(-1.0)] * 9, [shifted(-2.0)] * 9
        first, second = peer.teacher(), other.teacher()
        teacher = ServedTeacher({"math": first, "algebra": first, "code": second}, OneRank())
        tags = ["code", "math", "code", "algebra", "code"]
        samples = [Sample(TEXT, [False, False, True, place != 2], 0.0, tag=tag) for place, tag in enumerate(tags)]
        samples[2].completion_mask = [False] * 4
        found = teacher.infer(samples)
    assert (peer.asked, other.asked) == (2, 2)
    expected = {place: [-0.7 - shift, -0.8 - shift] for place, shift in ((0, 2), (1, 1), (3, 1), (4, 2))}
    assert {place: values.logprobs for place, values in found.items()} == {
        2: [], **{place: pytest.approx(values) for place, values in expected.items()}
    }  # fmt: skip


def test_of_several_teachers_the_lost_one_is_named(peer: Peer) -> None:
    with serving() as other:
        lost = other.teacher(timeout=0.2)
    with pytest.raises(TeacherFailure, match=re.escape(lost.url)):
        score_together([(peer.teacher(), TEXT), (lost, TEXT)])


def test_log_probs_are_those_of_each_text(peer: Peer) -> None:
    texts = [[1, number, 3] for number in range(2, 90)]
    scored = peer.teacher().score(texts)
    assert [one.logprobs for one in scored] == [pytest.approx([-number / 10, -0.3]) for number in range(2, 90)]


@pytest.mark.parametrize("fault", [die, busy, answer(b"")], ids=["dies", "busy", "nothing"])
def test_a_fault_that_passes_costs_no_text(peer: Peer, fault: Reply, request: pytest.FixtureRequest) -> None:
    peer.planned = [good, fault, fault]
    if "nothing" in request.node.name:  # an empty response is not JSON: it does not pass
        with pytest.raises(TeacherFailure, match="not valid JSON"):
            peer.teacher().score([TEXT] * 4)
        return
    assert [one.logprobs for one in peer.teacher().score([TEXT] * 4)] == [pytest.approx([-0.6, -0.7, -0.8])] * 4
    assert peer.asked == 6


HOSTILE: dict[str, tuple[Any, str]] = {
    "nonsense": (b"<html>", "not valid JSON"),
    "nested": (b"[" * 50000, "not valid JSON"),
    "a list": (b"[1]", "not a JSON object"),
    "no choices": (b"{}", "KeyError"),
    "null": (None, "NoneType entries for 4 tokens"),
    "short": (entries(TEXT)[:3], "3 entries for 4 tokens"),
    "long": ([*entries(TEXT), {}], "5 entries for 4 tokens"),
    "other tokens": (entries([5, 6, 7, 9]), "KeyError: '8'"),
    "nan": ([None, {"6": {"logprob": float("nan")}}, *entries(TEXT)[2:]], "a log-prob of nan"),
    "infinite": ([None, {"6": {"logprob": float("-inf")}}, *entries(TEXT)[2:]], "a log-prob of -inf"),
    "positive": (entries(TEXT, shift=2.0), "a log-prob of 1.4"),
    "a text": ([None, {"6": {"logprob": "-1"}}, *entries(TEXT)[2:]], "a log-prob of '-1'"),
    "true": ([None, {"6": {"logprob": True}}, *entries(TEXT)[2:]], "a log-prob of True"),
    "huge number": ([None, {"6": {"logprob": -(10**400)}}, *entries(TEXT)[2:]], "OverflowError"),
    "huge": (b'{"choices": "' + b"x" * 10**6 + b'"}', "has more than 73536 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_ends_clearly(peer: Peer, case: str) -> None:
    choice, message = HOSTILE[case]
    peer.planned = [answer(choice)]
    with pytest.raises(TeacherFailure) as failure:
        peer.teacher().score([TEXT])
    assert message in str(failure.value) and "--teacher_model_server http://127.0.0.1" in str(failure.value)


def test_a_refusal_is_shown_and_a_huge_one_is_cut(peer: Peer) -> None:
    peer.planned = [lambda handler, _: send(handler, b'{"detail": "no key"}', status=401)]
    with pytest.raises(TeacherFailure, match="HTTP 401: no key"):
        peer.teacher().score([TEXT])
    peer.planned = [lambda handler, _: send(handler, b"x" * 3 * 10**6, status=400)]
    with pytest.raises(TeacherFailure) as failure:
        peer.teacher().score([TEXT])
    assert len(str(failure.value)) < 2000


def test_a_server_that_does_not_answer_ends_at_the_time_limit(peer: Peer) -> None:
    peer.planned = [lambda handler, _: time.sleep(3)] * 9
    began = time.monotonic()
    with pytest.raises(TeacherFailure, match=r"after \d tries in 1 s \(--teacher_timeout\)"):
        peer.teacher(timeout=1).score([TEXT])
    assert time.monotonic() - began < 3


def decode(token: int) -> str:
    return chr(90 + token)


def test_a_server_is_proved_by_a_text_that_it_scores_twice(peer: Peer) -> None:
    peer.teacher().check(TEXT, decode, needed_length=100)
    assert peer.asked == 2
    with pytest.raises(TeacherFailure, match=r"its --max-model-len is 100, and .* take 101"):
        peer.teacher().check(TEXT, decode, needed_length=101)
    with pytest.raises(TeacherFailure, match=r"its token 6 is '`', and the policy's 'x'"):
        peer.teacher().check(TEXT, lambda token: "x", needed_length=100)
    peer.planned = [good, answer(entries(TEXT, shift=-0.1))]
    with pytest.raises(TeacherFailure, match=r"twice with a mean difference of 0\.100 nats"):
        peer.teacher().check(TEXT, decode, needed_length=100)
