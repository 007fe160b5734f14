"""Server mode: forked `swift rollout` processes and real trainers. The numbers match vLLM in the trainer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file

from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.generation.protocol.messages import RUN_IDLE_SECONDS, Routes
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, read_model_config
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from swift_megatron_grpo.types import Prompt, Rollout
from tests.forking.client import free_port, run_python
from tests.forking.programs import script_of_swift
from tests.support.runs import PLUGINS, PROBE, REWARDS, Finished, hf_difference, megatron_rlhf
from tests.support.servers import HOST, KEY, RolloutServer

pytestmark = pytest.mark.e2e
EXACT = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true"]
PROBED = ["--external_plugins", str(REWARDS), str(PROBE), "--callbacks", "probe"]
NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")


@pytest.fixture(scope="module")
def servers(folder: Path, dense: Path) -> Iterator[list[RolloutServer]]:
    running = [RolloutServer(dense, folder / f"server{number}.txt").start() for number in range(2)]
    for server in running:
        server.wait()
    yield running
    for server in running:
        server.stop()


def server_flags(*servers: RolloutServer) -> list[str]:
    return ["--vllm_mode", "server", "--vllm_server_base_url", *(server.url for server in servers)]


def train(model: Path, dataset: Path, folder: Path, flags: list[str], **more: object) -> Finished:
    return megatron_rlhf(model, dataset, folder, 2, [*EXACT, *flags], {API_KEY_VARIABLE: KEY}, **more)  # type: ignore


def numbers(run: Finished) -> list[list[float]]:
    assert run.code == 0, run.output[-4000:]
    assert KEY not in run.output and KEY not in (run.folder / "args.json").read_text()
    return [[step[name] for name in NUMBERS] for step in run.log]


def check_trace(run: Finished, urls: list[str]) -> None:
    """Steps 2 and 3: the phases of both ranks within them, and every completion on the server that answered it."""
    events = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert [name.split()[-1] for name in names.values()][2:] == sorted(urls)
    for rank in (0, 1):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        steps = [event for event in spans if event["name"] in ("step 2", "step 3")]
        assert names[rank].startswith(f"rank {rank}, ") and len(steps) == 2
        assert {"generation", "grading", "train", "weight_sync"} <= {event["name"] for event in spans}
        for event in spans:
            ends = event["ts"] + event["dur"]
            assert any(step["ts"] - 100 <= event["ts"] and ends <= step["ts"] + step["dur"] + 1e4 for step in steps)
    requests = [event for event in events if event.get("cat") == "request"]
    assert len(requests) == (64 if urls else 0) and {names[event["pid"]].split()[-1] for event in requests} == set(urls)


def test_a_server_listens_on_loopback_and_requires_the_key(servers: list[RolloutServer]) -> None:
    """Our routes and ms-swift's are available on loopback only, and only with the key."""
    server = servers[0]
    listening = subprocess.run(["ss", "-ltn", f"sport = :{server.port}"], text=True, stdout=subprocess.PIPE).stdout
    assert f"{HOST}:{server.port}" in listening and "0.0.0.0:" + str(server.port) not in listening
    assert KEY not in server.log.read_text()  # nor in its command line: test_rollout_command.py
    ours = [Routes.GENERATE, Routes.GENERATE_BATCH, Routes.SCORE, Routes.JOIN, Routes.RECEIVE, Routes.LEAVE]
    posts = [*ours, "/infer/", "/update_flattened_params/"]
    for method, route in [("GET", Routes.STATUS), ("GET", Routes.HELD_WEIGHTS), *(("POST", route) for route in posts)]:
        for key in (None, "another key"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                server.request(method, route, {}, key)
    message = {"messages": [{"role": "user", "content": "hello"}]}
    sampling = {"max_tokens": 4, "return_details": True}
    [output] = server.request("POST", "/infer/", {"infer_requests": [message], "request_config": sampling})
    assert 1 <= len(output["response"]["choices"][0]["token_ids"]) <= 4
    with pytest.raises(urllib.error.HTTPError, match="409"):  # no run has sent weights yet
        server.request("POST", Routes.GENERATE, {"request": message, "sampling": sampling, "weights_version": 0})


def test_numbers_of_two_servers_match_colocate_although_one_is_killed(
    folder: Path, dense: Path, dataset: Path, servers: list[RolloutServer]
) -> None:
    """One server is killed in the middle of a step, and its completions are generated again on the other.

    Completions have their own seeds and do not depend on the server, so the numbers match vLLM in the trainer.
    """
    flags = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--train_iters", "4",
             "--save_steps", "4", "--sleep_level", "1", "--global_batch_size", "32", "--max_completion_length", "100",
             "--micro_batch_size", "8", "--trace_steps", "2-3", *PROBED]  # fmt: skip
    killed: list[str] = []

    def kill(line: str) -> None:
        if "may generate with weights 2" in line and not killed:
            killed.append(line)
            servers[0].kill()

    remote = train(dense, dataset, folder / "remote", [*flags, *server_flags(*servers)], on_line=kill)
    servers[0].start()
    local = train(dense, dataset, folder / "local", flags)
    for step, (values, expected) in enumerate(zip(numbers(remote), numbers(local), strict=True)):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    assert all(step["rollout/k3_kl"] < 1e-7 for step in remote.log)
    assert len({step["reward"] for step in remote.log}) == 4
    for run in (remote, local):
        assert (
            " tensors bit for bit as they were sent; its log-probs of a fixed text of 128 tokens differ" in run.output
        )
        scored = [step["sync_check/max_diff"] for step in run.log if "sync_check/max_diff" in step]
        assert len(scored) >= 3 and max(scored) < 1e-5
    assert "--sleep_level: without effect with --vllm_mode server" in remote.output
    assert "weights 1 sent to 2 servers" in remote.output
    assert killed and "is lost: " in remote.output and "1 of 2 remain" in remote.output
    assert "unfinished completions of" in remote.output and "are recovered" in remote.output
    assert servers[1].request("GET", Routes.STATUS)["weights_version"] == 3
    check_trace(remote, [server.url for server in servers])
    check_trace(local, [])
    assert hf_difference(remote.last_checkpoint)["max"] < 1e-4
    servers[0].wait()


@pytest.mark.nightly
def test_requests_of_a_stuck_server_are_resent_and_cancelled_on_it(dense: Path, servers: list[RolloutServer]) -> None:
    """One server hangs with half of the requests. They time out and are resent to the other one.

    When the server continues, it does not generate them, because the client has disconnected.
    """
    stuck, healthy = servers
    config = ServerConfig(
        urls=(stuck.url, healthy.url), group_ports=(0, 0), timeout=120, request_timeout=15, api_key=KEY,
        bucket_bytes=2**20, needed_length=256, model=model_identity(read_model_config(dense)),
    )  # fmt: skip
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0)
    prompts = [Prompt(str(i), {"messages": [{"role": "user", "content": f"question {i}"}]}) for i in range(32)]
    requests = requests_for(prompts, 2, seed=1, version=7)
    batches_before = healthy.log.read_text().count(f"POST {Routes.GENERATE_BATCH}")
    try:
        engine.check()
        assert engine.needs_weights(7)
        engine.load_weights(load_file(dense / "model.safetensors").items(), 7, None, collect_checksums=False)
        engine.mark_verified()
        os.killpg(stuck.process.pid, signal.SIGSTOP)
        generation = engine.generate(requests, 2, SamplingConfig(1.0, 1.0, -1, 1.0, 200, ()))
        rollouts: dict[int, Rollout] = {}
        while len(rollouts) < len(requests):
            rollouts |= generation.next(7).finished
        before, answered = stuck.cpu_seconds(), engine.answered_requests()
    finally:
        os.killpg(stuck.process.pid, signal.SIGCONT)
        engine.shutdown()
    assert sorted(rollouts) == list(range(len(requests)))
    assert {rollout.weights_version for rollout in rollouts.values()} == {7}
    assert [request.server for request in answered] == [healthy.url] * len(requests)
    batches = healthy.log.read_text().count(f"POST {Routes.GENERATE_BATCH}") - batches_before
    assert 2 <= batches <= len(requests) // 4
    stuck.request("GET", "/health")  # it continues
    time.sleep(6)
    assert stuck.cpu_seconds() - before < 1  # seconds; generating takes more than two


def test_a_server_serves_one_run_at_a_time(dense: Path, servers: list[RolloutServer]) -> None:
    """Every run counts its own versions: weights of another run with the same version must not generate."""
    config = ServerConfig(
        urls=(servers[1].url,), group_ports=(0,), timeout=60, request_timeout=60, api_key=KEY,
        bucket_bytes=2**20, needed_length=256, model=model_identity(read_model_config(dense)),
    )  # fmt: skip
    weights = load_file(dense / "model.safetensors")
    ours, another = (RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0) for _ in range(2))
    requests = requests_for([Prompt("a", {"messages": [{"role": "user", "content": "question"}]})], 1, None, version=7)
    message = [{"role": "user", "content": "question"}]
    one = {"request": {"messages": message}, "sampling": {}, "weights_version": 7}
    score_request = {"tokens": [5, 6, 7], "weights_version": 7}
    try:
        ours.check()
        assert ours.needs_weights(7)
        ours.load_weights(weights.items(), 7, None, collect_checksums=False)
        ours.mark_verified()
        began = time.monotonic()
        with pytest.raises(ValueError, match=rf"it serves another run \({re.escape(ours._servers.run.name)}\), and"):
            another.check()
        assert time.monotonic() - began > RUN_IDLE_SECONDS  # the other run might just have ended
        for method, route, body in [
            ("POST", Routes.GENERATE, one),
            ("POST", Routes.GENERATE_BATCH, {"requests": [one]}),
            ("POST", Routes.SCORE, score_request),
            ("POST", Routes.JOIN, {"host": HOST, "port": 0, "timeout": 1}),
            ("POST", Routes.RECEIVE, {"version": 7, "lora": False, "collect_checksums": False}),
            ("GET", Routes.HELD_WEIGHTS, None),
        ]:
            with pytest.raises(urllib.error.HTTPError, match="423"):
                servers[1].request(method, route, body, run=another._servers.run)
        generation = ours.generate(requests, 1, SamplingConfig(1.0, 1.0, -1, 1.0, 8, ()))
        assert generation.next(7).finished[0].weights_version == 7  # it was not disturbed
        ours.shutdown()
        began = time.monotonic()
        another.check()  # the lease is free now
        assert time.monotonic() - began < 5
        with pytest.raises(urllib.error.HTTPError, match="409"):  # the server has no weights of this run
            servers[1].request("POST", Routes.SCORE, score_request, run=another._servers.run)
    finally:
        ours.shutdown()
        another.shutdown()


ADAPTER = ["--tuner_type", "lora", "--vllm_enable_lora", "true", "--lr", "1e-2", "--train_iters", "3"]


def test_sending_only_the_adapter_matches_between_server_and_colocate(folder: Path, dense: Path, dataset: Path) -> None:
    """Both engines run the trained adapter on the unchanged weights of the checkpoint."""
    server = RolloutServer(dense, folder / "with adapter.txt", ["--vllm_enable_lora", "true"]).start()
    try:
        local = train(dense, dataset, folder / "local adapter", ADAPTER)
        server.wait()
        remote = train(dense, dataset, folder / "remote adapter", [*ADAPTER, *server_flags(server)])
    finally:
        server.stop()
    for step, (values, expected) in enumerate(zip(numbers(remote), numbers(local), strict=True)):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    for run in (local, remote):
        assert all(step["rollout/k3_kl"] < 1e-7 for step in run.log)
        assert len({step["reward"] for step in run.log}) == 3


def test_an_adapter_that_vllm_would_apply_only_in_part_stops_the_run(folder: Path, dense: Path, dataset: Path) -> None:
    fault = str(PLUGINS / "misnamed_adapter.py")
    run = train(dense, dataset, folder / "misnamed", [*ADAPTER, "--external_plugins", str(REWARDS), fault])
    assert run.code != 0
    assert "modules of the adapter, because it has no modules of these names: " in run.output
    assert "feed_forward" in run.output and "Use --vllm_enable_lora false" in run.output


def test_a_run_whose_servers_are_gone_saves_a_checkpoint_and_ends(
    folder: Path, dense: Path, dataset: Path, servers: list[RolloutServer]
) -> None:
    """The only server is killed when its weights are verified. The run ends with a checkpoint and one clear message."""

    def kill(line: str) -> None:
        if "weights 2 sent" in line:
            servers[1].kill()

    flags = ["--train_iters", "5", "--save_steps", "100", "--vllm_server_timeout", "3", *server_flags(servers[1])]
    run = train(dense, dataset, folder / "gone", flags, on_line=kill)
    assert run.code != 0
    assert f"no rollout server has answered for 3 s (--vllm_server_timeout 3): {servers[1].url}" in run.output
    assert "then resume this run from its last checkpoint" in run.output
    assert run.last_checkpoint.name == "checkpoint-2" and (run.last_checkpoint / "model.safetensors").is_file()


# ---- checks at start


class OtherServer(BaseHTTPRequestHandler):
    """A web server without our routes, as `swift rollout` without this package."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"urls": ("http://127.0.0.1:1",)}, "rollout server http://127.0.0.1:1 did not answer within"),
        ({"api_key": None}, "requires its --api_key"),
        ({"model": {"hidden_size": 65}}, "hidden_size is 64 there and 65 here"),
        ({"model": {"torch_dtype": "bfloat16"}}, "is 'float32' there .* start it .* with --torch_dtype bfloat16"),
        ({"lora_rank": 8}, "start it with --vllm_enable_lora true"),
        (
            {"turns": RemoteTurnsConfig("--max_turns 3", max_turns=3)},
            "without --multi_turn_scheduler, but",
        ),
        ({"urls": "not ours"}, "run `pip install .` in a clone"),
        ({}, None),
    ],
)
def test_an_unsuitable_server_is_refused(
    servers: list[RolloutServer], dense: Path, change: dict[str, object], message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = ServerConfig(
        urls=(servers[0].url,), group_ports=(0,), timeout=2, request_timeout=10, api_key=KEY, bucket_bytes=2**20,
        needed_length=256, model=model_identity(read_model_config(dense)),
    )  # fmt: skip
    if change.get("urls") == "not ours":
        web = HTTPServer((HOST, free_port()), OtherServer)
        Thread(target=web.serve_forever, daemon=True).start()
        change = {"urls": (f"http://{HOST}:{web.server_port}",)}
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    engine = RemoteVllm(replace(config, **change), WeightSender(torch.device("cpu"), 2**20), rank=0)  # type: ignore
    try:
        if message is None:
            engine.check()
            return
        with pytest.raises(ValueError, match=message) as refused:
            engine.check()
        if "did not answer" in message:
            assert "http_proxy=http://proxy.example:3128 is set but not used" in str(refused.value)
    finally:
        engine.shutdown()


def test_an_unreachable_server_stops_the_command_before_the_model_loads(
    folder: Path, dense: Path, dataset: Path
) -> None:
    flags = ["--vllm_mode", "server", "--vllm_server_host", HOST, "--vllm_server_port", str(free_port()),
             "--vllm_server_timeout", "1"]  # fmt: skip
    run = train(dense, dataset, folder / "unreachable", flags)
    assert run.code != 0
    assert "did not answer within" in run.output and "Loading weights" not in run.output
    assert "model_config: ModelConfig" not in run.output


@pytest.mark.nightly
def test_without_the_plugin_swift_rollout_is_unchanged(dense: Path) -> None:
    """It fails on a CPU as without this package."""
    flags = ["--model", str(dense), "--model_type", "qwen3", "--template", "qwen3"]
    code, output = run_python(script_of_swift("rollout.py"), *flags, SWIFT_MEGATRON_GRPO="off")
    assert code != 0
    if not torch.cuda.is_available():
        assert "local_device_count (0) must be greater than or equal to" in output


def test_the_synchronous_engine_is_refused(folder: Path, dense: Path) -> None:
    server = RolloutServer(dense, folder / "synchronous.txt", ["--vllm_use_async_engine", "false"]).start()
    assert server.process is not None and server.process.wait(timeout=300) != 0
    assert "remove the flag, or set SWIFT_MEGATRON_GRPO=off" in server.log.read_text()
