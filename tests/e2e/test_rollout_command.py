"""One real `swift rollout`, as a user starts it; the other tests fork their servers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, read_model_config
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.types import Prompt
from tests.support.ends import check_server_ends
from tests.support.runs import REPORTS_EXPERTS, make_model
from tests.support.servers import HOST, KEY, RolloutServer

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


@pytest.fixture(scope="module")
def moe(folder: Path) -> Path:
    return make_model(folder / "moe", kind="moe")


@pytest.fixture(scope="module")
def server(folder: Path, moe: Path) -> Iterator[RolloutServer]:
    server = RolloutServer(moe, folder / "server.txt", REPORTS_EXPERTS, command=True).start().wait()
    yield server
    server.stop()


def test_the_key_is_not_shown_and_the_server_listens_on_loopback(server: RolloutServer) -> None:
    listening = subprocess.run(["ss", "-ltn", f"sport = :{server.port}"], text=True, stdout=subprocess.PIPE).stdout
    assert f"{HOST}:{server.port}" in listening and "0.0.0.0:" + str(server.port) not in listening
    assert KEY not in server.log.read_text() and KEY not in str([process.cmdline() for process in server.processes()])


def test_it_generates_with_the_weights_that_were_sent_and_reports_experts(server: RolloutServer, moe: Path) -> None:
    """The engine is a separate process, which only the environment gives vLLM's fixes for CPUs."""
    config = ServerConfig(
        urls=(server.url,), group_ports=(0,), timeout=60, request_timeout=60, api_key=KEY, bucket_bytes=2**20,
        needed_length=256, model=model_identity(read_model_config(moe)),
    )  # fmt: skip
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0)
    prompt = Prompt("a", {"messages": [{"role": "user", "content": "question"}]})
    weights = load_file(moe / "model.safetensors")
    try:
        engine.check()
        assert engine.needs_weights(7)
        engine.load_weights(weights.items(), 7, None, collect_checksums=False)
        engine.mark_verified()
        generation = engine.generate(
            requests_for([prompt], 1, None, version=7, with_experts=1), 1, SamplingConfig(1.0, 1.0, -1, 1.0, 8, ())
        )
        rollout = generation.next(7).finished[0]
    finally:
        engine.shutdown()
    assert rollout.weights_version == 7
    assert rollout.routed_experts is not None and rollout.routed_experts.any(axis=(1, 2)).all()


def test_sigterm_ends_it_with_all_of_its_processes(server: RolloutServer) -> None:
    check_server_ends(server, signal.SIGTERM, from_terminal=False)
