"""Attacks on one real `swift rollout`: it refuses what it cannot generate from, keeps generating, and ends if stuck."""

from __future__ import annotations

import base64
import http.client
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from swift_megatron_grpo.generation.protocol.messages import Completion, Routes, RunIdentity
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, read_model_config
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.settings.config import ServerConfig
from tests.support.fuzzing import STOCK_BODIES, damaged_body
from tests.support.runs import make_model
from tests.support.servers import HOST, KEY, RolloutServer

pytestmark = pytest.mark.e2e
HEALTH_TIMEOUT = 8.0
LIMITS = ["--health_timeout", str(HEALTH_TIMEOUT), "--body_timeout", "1", "--idle_timeout", "2",
          "--max_body_bytes", "100000", "--max_prompt_characters", "2000", "--max_messages", "8",
          "--max_connections", "300"]  # fmt: skip
VERSION = 7


@pytest.fixture(scope="module")
def server(folder: Path, dense: Path) -> Iterator[RolloutServer]:
    server = RolloutServer(dense, folder / "server.txt", LIMITS).start()
    server.wait()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def trainer(server: RolloutServer, dense: Path) -> Iterator[RemoteVllm]:
    """A trainer that has sent its weights, so that requests reach the engine."""
    config = ServerConfig(
        urls=(server.url,), group_ports=(0,), timeout=60, request_timeout=60, api_key=KEY, bucket_bytes=2**20,
        needed_length=256, model=model_identity(read_model_config(dense)),
    )  # fmt: skip
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**18), rank=0)
    engine.check()
    assert engine.needs_weights(VERSION)
    engine.load_weights(load_file(dense / "model.safetensors").items(), VERSION, None, collect_checksums=False)
    engine.mark_verified()
    yield engine
    engine.shutdown()


def generate_body(**sampling: Any) -> dict[str, Any]:
    return {
        "request": {"messages": [{"role": "user", "content": "hello"}]},
        "sampling": {"max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": True, "return_details": True}
        | sampling,
        "weights_version": VERSION,
    }


def respond(
    server: RolloutServer, method: str, route: str, body: bytes | object = b"", run: RunIdentity | None = None,
    **headers: str,
) -> tuple[int, str]:  # fmt: skip
    """Return status and text of the response, with the key unless `headers` hold another."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **(run.headers if run else {})}
    try:
        connection.request(method, route, data, {**usual, **headers})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def raw(server: RolloutServer, data: bytes, seconds: float = 10) -> bytes:
    """Send bytes and return what arrives until the server closes the connection, or no more comes."""
    with socket.create_connection((HOST, server.port), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


def head(route: str, length: int, key: bytes | None = KEY.encode()) -> bytes:
    authorization = b"" if key is None else b"Authorization: Bearer " + key + b"\r\n"
    return (
        f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n".encode()
        + authorization
        + b"\r\n"
    )


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def resident(server: RolloutServer) -> int:
    return sum(process.memory_info().rss for process in server.processes())


# ---- what is refused


def test_the_key_is_required_before_the_body_is_read(server: RolloutServer) -> None:
    """The server answers although not one byte of the 200 MB is sent. Keys may contain any byte."""
    for key in (None, b"wrong", "schlüssel".encode(), b"\xff\xfe"):
        response = raw(server, head(Routes.GENERATE, 200_000_000, key))
        assert response.startswith(b"HTTP/1.1 401"), response
    assert raw(server, head("/health", 200_000_000, None)).startswith(b"HTTP/1.1 401")
    for route in ("/docs", "/redoc", "/openapi.json", Routes.STATUS, "/get_world_size/", "/nothing"):
        assert respond(server, "GET", route, Authorization="Bearer wrong")[0] == 401
    assert respond(server, "GET", "/openapi.json")[0] == 200
    assert respond(server, "GET", "/health", Authorization="")[0] == 200


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"temperature": True}, "'sampling.temperature': Input should be a valid number"),
        ({"max_tokens": 1.5}, "'sampling.max_tokens': Input should be a valid integer"),
        ({"seed": "abc"}, "'sampling.seed': Input should be a valid integer"),
        ({"top_p": 1e400}, "the body is not JSON"),  # json writes Infinity
        ({"stop": [""]}, "'sampling.stop.0': String should have at least 1 character"),
        ({"n": 10**9}, "'sampling.n'"),
        ({"bogus": 1}, "'sampling.bogus': Extra inputs are not permitted"),
        ({"temperature": 5.0}, "temperature must be in [0, 2]"),  # so far, vLLM's refusals were failures of the server
        ({"structured_outputs_regex": "(xyz"}, ""),
    ],
)
def test_a_sampling_value_of_a_wrong_type_is_refused(
    server: RolloutServer, trainer: RemoteVllm, change: dict[str, Any], problem: str
) -> None:
    """Such values ended the input thread of vLLM's engine."""
    status, text = respond(server, "POST", Routes.GENERATE, generate_body(**change), trainer._servers.run)
    assert status == 422 and problem in text and "abc" not in text


@pytest.mark.parametrize(
    "request_",
    [
        {"images": ["http://127.0.0.1:1/a.png"]},
        {"images": ["/dev/random"]},
        {"videos": ["a.mp4"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/hostname"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1"}}]}
            ]
        },
    ],
)
def test_media_are_refused_by_a_text_model(
    server: RolloutServer, trainer: RemoteVllm, request_: dict[str, Any], tmp_path: Path
) -> None:
    body = generate_body()
    body["request"] |= request_
    status, text = respond(server, "POST", Routes.GENERATE, body, trainer._servers.run)
    assert status == 422 and "takes text only" in text
    stock = {"infer_requests": [body["request"]], "request_config": {"max_tokens": 2}}
    status, text = respond(server, "POST", "/infer/", stock)
    assert status == 422 and "takes text only" in text


def test_bodies_beyond_a_limit_are_refused_and_the_answers_are_short(
    server: RolloutServer, trainer: RemoteVllm
) -> None:
    run = trainer._servers.run
    long = generate_body()
    long["request"]["messages"][0]["content"] = "a" * 2001
    many = generate_body()
    many["request"]["messages"] *= 9
    wrong = {"tokens": ["x"] * 10000, "weights_version": VERSION}
    cases: list[tuple[int, str, bytes | object, str]] = [
        (413, Routes.GENERATE, b" " * 100001, "--max_body_bytes"),
        (422, Routes.GENERATE, b"[" * 100 + b"]" * 100, "--max_nesting"),
        (422, Routes.GENERATE, b"[" * 90000, "recursion limit"),
        (422, Routes.GENERATE, b'{"a": NaN}', "not JSON"),
        (422, Routes.GENERATE, b'"\\ud800"', "not JSON"),
        (422, Routes.GENERATE, long, "--max_prompt_characters"),
        (422, Routes.GENERATE, many, "--max_messages"),
        (422, Routes.SCORE, wrong, "'tokens.0': Input should be a valid integer"),
        (422, Routes.SCORE, {"tokens": [1, 10**6], "weights_version": VERSION}, "beyond the vocabulary"),
        (422, Routes.JOIN, {"host": HOST, "port": 70000, "timeout": 1}, "'port'"),
        (422, "/infer/", {"infer_requests": wrong["tokens"]}, "'infer_requests.0'"),
        (422, "/init_communicator/", {"host": HOST, "port": -1, "world_size": 2}, "'port'"),
    ]
    for expected, route, body, reason in cases:
        status, text = respond(server, "POST", route, body, run)
        assert status == expected and reason in text, (route, status, text)
        assert len(text) < 1000 and "Traceback" not in text
    chunked = head(Routes.GENERATE, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert b" 413 " in raw(server, chunked + b"ffff\r\n" + b" " * 0xFFFF + b"\r\n" + b"ffff\r\n" + b" " * 0xFFFF)


def test_a_prompt_without_room_is_the_clients_fault(server: RolloutServer, trainer: RemoteVllm) -> None:
    """A message without template is one as well."""
    body = generate_body()
    body["request"]["messages"][0]["content"] = "word " * 300  # 256 tokens fit
    status, text = respond(server, "POST", Routes.GENERATE, body, trainer._servers.run)
    assert status == 422 and "leaves no room" in text
    body["request"]["messages"] = [{"role": "tool", "content": "first"}]
    status, text = respond(server, "POST", Routes.GENERATE, body, trainer._servers.run)
    assert status == 422 and "the template cannot encode the prompt" in text


def test_slow_and_idle_clients_are_cut_off(server: RolloutServer) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        slow_body = threads.submit(raw, server, head(Routes.GENERATE, 50) + b"{")
        slow_head = threads.submit(raw, server, b"GET /health HTTP/1.1\r\nHost:")
        idle = threads.submit(raw, server, b"")
    assert slow_body.result().startswith(b"HTTP/1.1 408")
    assert slow_head.result() == idle.result() == b""
    assert time.monotonic() - began < 8
    endless = b"GET /health HTTP/1.1\r\nA: " + b"a" * 2**18  # headers without an end
    assert raw(server, endless) == b""


def test_further_connections_are_closed(server: RolloutServer) -> None:
    """Idle connections make room for others within --idle_timeout."""
    idle = [socket.create_connection((HOST, server.port)) for _ in range(300)]
    try:
        assert raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        time.sleep(4.5)
        assert respond(server, "GET", "/health")[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_the_name_of_a_run_is_not_enough_to_evict_it(server: RolloutServer, trainer: RemoteVllm) -> None:
    """The status shows the name to every client with the key. No answer shows the secret."""
    run = trainer._servers.run
    impostor = RunIdentity(json.loads(respond(server, "GET", Routes.STATUS)[1])["run"], "a guess")
    assert impostor.name == run.name
    assert respond(server, "POST", Routes.LEAVE, run=impostor)[0] == 200  # as for any run without the lease
    join = {"host": HOST, "port": 0, "timeout": 1}
    receive = {"version": 8, "lora": False, "collect_checksums": False}
    for route, body in [(Routes.JOIN, join), (Routes.RECEIVE, receive), (Routes.GENERATE, generate_body())]:
        assert respond(server, "POST", route, body, impostor)[0] == 423
    assert respond(server, "POST", Routes.JOIN, join)[0] == 422  # without a run
    status, text = respond(server, "GET", Routes.STATUS, run=impostor)
    assert status == 200 and run.secret not in text
    assert respond(server, "POST", Routes.GENERATE, generate_body(), run)[0] == 200


@pytest.fixture(scope="module")
def image_server(folder: Path) -> Iterator[RolloutServer]:
    model = make_model(folder / "qwen2_5_vl", "qwen2_5_vl")
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 2, "video": 0}', "--max_prompt_characters", "2000"]
    server = RolloutServer(model, folder / "image_server.txt", limits).start()
    server.wait()
    yield server
    server.stop()


def test_an_image_server_opens_no_file_that_a_text_names(image_server: RolloutServer) -> None:
    """It would not be an image. ms-swift looks for the tag in the joined text of all parts."""
    tag = "<img>/etc/passwd</img>"
    parts = [{"type": "text", "text": text} for text in (tag[:3], tag[3:])]
    question = {"role": "user", "content": "?"}
    for messages in ([{"role": "user", "content": parts}], [question, {"role": "assistant", "content": tag}, question]):
        body = {"infer_requests": [{"messages": messages}], "request_config": {"max_tokens": 2}}
        status, text = respond(image_server, "POST", "/infer/", body)
        assert status == 200, text
    assert "UnidentifiedImageError" not in image_server.log.read_text()


def test_images_and_text_of_an_image_server_are_limited(image_server: RolloutServer) -> None:
    def encoded(kind: str) -> str:
        file = BytesIO()
        Image.new("RGB", (56, 56)).save(file, format=kind)
        return base64.b64encode(file.getvalue()).decode()

    for status, images, text, reason in (
        (200, [encoded("PNG")], "?", ""),
        (422, [encoded("PPM")], "?", "must be an image: PNG"),
        (422, [encoded("PNG")] * 3, "?", "more than 2 images in a prompt"),
        (422, [], "data: x y " * 201, "--max_prompt_characters"),
    ):
        request = {"messages": [{"role": "user", "content": text}], "images": images}
        body = {"infer_requests": [request], "request_config": {"max_tokens": 2}}
        assert (response := respond(image_server, "POST", "/infer/", body))[0] == status and reason in response[1]


# ---- what keeps working


@pytest.mark.nightly
def test_weights_that_arrive_slowly_are_no_stuck_engine(
    server: RolloutServer, trainer: RemoteVllm, dense: Path
) -> None:
    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(load_file(dense / "model.safetensors").items()):
            if number == 5:
                time.sleep(HEALTH_TIMEOUT * 1.5)
            yield item

    for recipient in trainer._servers.all:
        recipient.invalidate_weights()
    assert trainer.needs_weights(VERSION)
    trainer.load_weights(slowly(), VERSION, None, collect_checksums=False)
    trainer.mark_verified()
    assert respond(server, "POST", Routes.GENERATE, generate_body(), trainer._servers.run)[0] == 200


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_five_hundred_damaged_requests_change_nothing(server: RolloutServer, trainer: RemoteVllm) -> None:
    """Every answer is 2xx or 4xx. Afterwards the server generates the same tokens, in the same memory."""
    run = trainer._servers.run
    chooser = random.Random(2026)
    ours: dict[str, Any] = {
        Routes.GENERATE: generate_body(),
        Routes.SCORE: {"tokens": [5, 6, 7], "weights_version": VERSION},
        Routes.JOIN: {"host": HOST, "port": 0, "timeout": 1.0},
        Routes.RECEIVE: {"version": 8, "lora": False, "collect_checksums": False},
    }
    bodies = ours | STOCK_BODIES
    stranger = RunIdentity(run.name, "a guess")  # with `run`, an undamaged join would end the transfer of weights

    def attack(number: int) -> tuple[int, str, bytes, int]:
        route = chooser.choice(list(bodies))
        identity = stranger if route in (Routes.JOIN, Routes.RECEIVE) else run
        body = damaged_body(bodies[route], chooser)
        method = chooser.choices(("POST", "GET", "PUT", "DELETE"), (20, 1, 1, 1))[0]
        return number, f"{method} {route}", body, respond(server, method, route, body, identity)[0]

    def fixed() -> tuple[list[int], list[float] | None]:
        body = generate_body(max_tokens=24)
        completion = Completion.from_json(json.loads(respond(server, "POST", Routes.GENERATE, body, run)[1]))
        return completion.completion_ids, completion.logprobs

    for number in range(100):  # memory that every kind of request allocates once
        attack(number)
    before, (tokens, logprobs_before) = resident(server), fixed()
    answers = [attack(number) for number in range(500)]
    odd = [answer for answer in answers if not (200 <= answer[3] < 300 or 400 <= answer[3] < 500)]
    assert not odd, odd[:3]
    assert {answer[3] for answer in answers} >= {200, 422}
    now, logprobs = fixed()
    # Exactly, for the tokens. Log-probs in bfloat16 depend on what vLLM computes a token with, such as a cached prefix.
    assert now == tokens and logprobs == pytest.approx(logprobs_before, abs=0.05)
    assert resident(server) < 1.05 * before
    assert "Traceback" not in str(answers)


def test_stock_requests_at_the_same_time_get_their_own_answers(server: RolloutServer) -> None:
    """They share one pipe to the engine. Meanwhile the server answers others."""

    def infer(tokens: int) -> int:
        prompts = [{"messages": [{"role": "user", "content": "hello"}]}]
        config = {"max_tokens": tokens, "seed": 3, "return_details": True}
        status, text = respond(server, "POST", "/infer/", {"infer_requests": prompts, "request_config": config})
        assert status == 200
        return len(json.loads(text)[0]["response"]["choices"][0]["token_ids"])

    sizes = [3, 1, 4, 2, 5, 6]
    with ThreadPoolExecutor(len(sizes)) as threads:
        lengths = threads.map(infer, sizes)
        assert respond(server, "GET", "/health")[0] == 200
        assert list(lengths) == sizes


# ---- what ends it; keep these tests last


def test_a_stuck_engine_ends_the_server_with_its_reason(server: RolloutServer, trainer: RemoteVllm) -> None:
    """The process of vLLM's core is stopped: it keeps its connections, and raises no error."""
    assert server.process is not None
    tree = server.processes()
    [core] = [process for process in tree if process.name().startswith("VLLM::EngineCor")]
    core.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(respond, server, "POST", Routes.GENERATE, generate_body(), trainer._servers.run)
        stock = threads.submit(respond, server, "POST", "/infer/", STOCK_BODIES["/infer/"])
        time.sleep(1)
        assert respond(server, "GET", "/health")[0] == 200  # not detected yet, and the server still answers
    status, text = waiting.result()
    assert status == 503 and "the engine has generated no token for" in text
    assert stock.result()[0] == 500
    assert server.process.wait(timeout=20) == 1
    assert time.monotonic() - began < HEALTH_TIMEOUT + 5
    deadline = time.monotonic() + 20  # for the kernel, to release the memory of a killed process
    while any(map(is_alive, tree[1:])):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_neither_the_key_nor_the_secret_of_a_run_is_in_the_log(server: RolloutServer, trainer: RemoteVllm) -> None:
    """ms-swift logs all arguments."""
    log = server.log.read_text()
    assert "GRPORolloutArguments(" in log and KEY not in log and trainer._servers.run.secret not in log
    assert "swift rollout: the engine has generated no token for" in log
