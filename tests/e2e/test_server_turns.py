"""Conversations that a real `swift rollout` leads. The numbers are those of vLLM in the training processes."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from swift_megatron_grpo.config import RemoteTurnsConfig, ServerConfig
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.protocol.messages import API_KEY_VARIABLE, Completion, Routes
from swift_megatron_grpo.protocol.model_identity import read_model_identity
from tests.e2e.hf_check import check_by_hand
from tests.e2e.riddles import WAIT
from tests.e2e.runs import REWARDS, Finished, make_dataset, megatron_rlhf
from tests.e2e.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--train_iters", "2",
         "--save_steps", "100", "--max_tokens_per_micro_batch", "512", "--clip_grad", "100"]  # fmt: skip
NUMBERS = ("loss", "grad_norm", "reward", "num_turns")
TRAINED = ("prompt_ids", "completion_ids", "sampled", "conversation", "infos", "rewards", "text", "finish_reason")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "data.jsonl", rows=4)


def closed(folder: Path) -> list[str]:
    return (folder / "closed.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def riddles(folder: Path, dense: Path) -> Iterator[RolloutServer]:
    """It has a fixture's time to start while the first test trains with vLLM in the training processes."""
    flags = ["--multi_turn_scheduler", "gym_scheduler", "--gym_env", "riddles", "--max_turns", "3",
             "--external_plugins", str(HERE / "riddles.py")]  # fmt: skip
    closed_log = {"RIDDLES_CLOSED": str(folder / "closed.txt")}
    server = RolloutServer(dense, folder / "riddles.txt", flags, closed_log).start()
    yield server
    server.stop()


def train(model: Path, dataset: Path, folder: Path, flags: Sequence[str]) -> tuple[Finished, list[dict[str, Any]]]:
    """The run, and the rollouts of its first step."""
    dump = folder.with_suffix(".rollouts")
    run = megatron_rlhf(
        model, dataset, folder, 2, [*FLAGS, "--rollout_dump", str(dump), *flags], {API_KEY_VARIABLE: KEY}
    )
    assert run.code == 0, run.output[-4000:]
    return run, [json.loads(line) for line in (dump / "rollout-000000.jsonl").read_text().splitlines()]


def check_same(remote: tuple[Finished, list[dict[str, Any]]], local: tuple[Finished, list[dict[str, Any]]]) -> None:
    for there, here in zip(remote[1], local[1], strict=True):
        assert {name: there[name] for name in TRAINED} == {name: here[name] for name in TRAINED}
        assert there["logprobs"] == pytest.approx(here["logprobs"], abs=1e-5)
    for there, here in zip(remote[0].log, local[0].log, strict=True):
        assert [there[name] for name in NUMBERS] == pytest.approx([here[name] for name in NUMBERS], rel=1e-5, abs=1e-6)
    assert all(step["rollout/k3_kl"] < 1e-7 for run in (remote[0], local[0]) for step in run.log)


def test_an_environment_behind_a_server(folder: Path, dense: Path, dataset: Path, riddles: RolloutServer) -> None:
    """The trainer's script is one for ms-swift's: scheduler and environment are named on the server alone."""
    reward = ["--reward_funcs", "turns"]
    local = train(dense, dataset, folder / "local", [
        "--multi_turn_scheduler", "gym_scheduler", "--gym_env", "riddles", "--max_turns", "3", *reward,
        "--external_plugins", str(HERE / "riddles.py"), str(HERE / "turns_reward.py")])  # fmt: skip
    riddles.wait()
    remote = train(dense, dataset, folder / "remote", [
        "--vllm_mode", "server", "--vllm_server_base_url", riddles.url, "--vllm_server_pass_dataset", "true", *reward,
        "--external_plugins", str(HERE / "turns_reward.py")])  # fmt: skip
    check_same(remote, local)
    assert {row["infos"]["num_turns"] for row in remote[1]} == {1, 2, 3}
    tokenizer = AutoTokenizer.from_pretrained(dense)
    for row in remote[1]:
        # The environment's words between the turns are not trained.
        not_sampled = compress(row["completion_ids"], map(not_, row["sampled"]))
        assert tokenizer.decode(list(not_sampled)).count("user\nUse ") == row["infos"]["num_turns"] - 1
        assert sum(row["sampled"]) == len(row["logprobs"])
        assert row["rewards"] == [row["infos"]["num_turns"], row["infos"]["total_reward"]]
    # also those that --max_turns has ended; of every generation, each once
    assert sorted(closed(folder)) == sorted({*closed(folder)}) and len(closed(folder)) == 16


@pytest.mark.slow
def test_conversations_ahead_of_training(folder: Path, dense: Path, dataset: Path, riddles: RolloutServer) -> None:
    riddles.wait()
    before = len(closed(folder)) if (folder / "closed.txt").exists() else 0
    run, _ = train(dense, dataset, folder / "ahead", [
        "--vllm_mode", "server", "--vllm_server_base_url", riddles.url, "--vllm_server_pass_dataset", "true",
        "--async_generate", "true", "--train_iters", "4", "--reward_funcs", "turns",
        "--external_plugins", str(HERE / "turns_reward.py")])  # fmt: skip
    assert [step["rollout/staleness_max"] for step in run.log] == [0, 1, 1, 1]
    assert len(closed(folder)) - before == 4 * 8


def config_of(server: RolloutServer, model: Path) -> ServerConfig:
    return ServerConfig(
        urls=(server.url,), group_ports=(0,), timeout=10, request_timeout=60, api_key=KEY, bucket_bytes=2**20,
        needed_length=256, model=read_model_identity(model), turns=RemoteTurnsConfig("--max_turns 3", max_turns=3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (None, r"it runs multi-turn conversations \(--multi_turn_scheduler gym_scheduler --max_turns 3"),
        (
            RemoteTurnsConfig("", scheduler="hints"),
            "its --multi_turn_scheduler is gym_scheduler, and this run's is hin",
        ),
        (RemoteTurnsConfig("", max_turns=4), "its --max_turns is 3, and this run's is 4; give both the same"),
    ],
)
def test_a_server_that_leads_otherwise_is_refused(
    riddles: RolloutServer, dense: Path, wanted: RemoteTurnsConfig | None, said: str
) -> None:
    riddles.wait()
    config = replace(config_of(riddles, dense), turns=wanted)
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0)
    try:
        with pytest.raises(ValueError, match=said):
            engine.check()
    finally:
        engine.shutdown()


def test_a_conversation_that_is_taken_back_closes_its_environment(
    folder: Path, dense: Path, riddles: RolloutServer
) -> None:
    """By new weights, and by who asks for it once more."""
    riddles.wait()
    weights = load_file(dense / "model.safetensors")
    engine = RemoteVllm(config_of(riddles, dense), WeightSender(torch.device("cpu"), 2**20), rank=0)
    sampling = {"max_tokens": 4, "temperature": 1.0, "seed": 3}

    def ask(uuid: str, content: str) -> Any:
        request = {
            "messages": [{"role": "user", "content": content}],
            "uuid": uuid,
            "data_dict": {"letters": "abcdefgh"},
        }
        asked = {"request": request, "sampling": sampling, "weights_version": 7}
        try:
            return Completion.from_json(riddles.ask("POST", Routes.GENERATE, asked, run=engine._servers.run))
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def ask_and_keep(answers: list[Any], uuid: str) -> Thread:
        thread = Thread(target=lambda: answers.append(ask(uuid, WAIT)))
        thread.start()
        time.sleep(2)
        return thread

    def send(version: int) -> None:
        engine.load_weights(weights.items(), version, None, collect_checksums=False)

    try:
        assert engine.check()  # which says that the environment grades
        assert engine.needs_weights(7)
        send(7)
        answers: list[Any] = []
        first = ask_and_keep(answers, "waits")
        again = ask_and_keep(answers, "waits")  # as after a request that took too long
        first.join(timeout=20)
        assert len(answers) == 1 and closed(folder)[-1] == "waits"
        beside = ask("beside", "Hello.")
        assert beside.infos["num_turns"] == len(beside.messages) // 2 and True in beside.sampled
        assert engine.needs_weights(8)
        send(8)
        again.join(timeout=20)
        assert len(answers) == 2 and all("cancelled" in answer for answer in answers)
        until = time.monotonic() + 10
        while closed(folder).count("waits") < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert closed(folder).count("waits") == 2
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_a_scheduler_that_changes_answers_and_never_ends(folder: Path, dense: Path, dataset: Path) -> None:
    """What it put in is not trained, nor what it took out of the loss, and all ends where there is no room left."""
    turns = ["--multi_turn_scheduler", "hints", "--max_turns", "50"]
    plugins = [str(REWARDS), str(HERE / "hints.py")]
    server = RolloutServer(dense, folder / "hints.txt", [*turns, "--external_plugins", plugins[1]]).start()
    try:
        local = train(dense, dataset, folder / "local hints", [*turns, "--external_plugins", *plugins])
        server.wait()
        remote = train(dense, dataset, folder / "remote hints", [
            *turns, "--vllm_mode", "server", "--vllm_server_base_url", server.url])  # fmt: skip
    finally:
        server.stop()
    check_same(remote, local)
    first = local[0].log[0]
    assert first["num_turns"] > 3 and "num_turns/lost" not in first
    assert first["rewards/Letters/mean"] > 0 and first["reward_std"] > 0  # of the last answer there was room for
    check_by_hand(first, dense, folder / "local hints.rollouts" / "rollout-000000.jsonl")
    for row in remote[1]:
        assert len(row["prompt_ids"]) + len(row["completion_ids"]) <= 256 + 40
        hint = b" wait, "
        assert row["sampled"][: 4 + len(hint)] == [True] * 4 + [False] * len(hint)
        assert row["finish_reason"] == "length" and row["infos"]["num_turns"] > 3
