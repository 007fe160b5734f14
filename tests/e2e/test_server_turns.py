"""Conversations on a real `swift rollout`. The numbers match vLLM in the training processes."""

from __future__ import annotations

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

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.generation.protocol.messages import Completion, Routes
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, read_model_config
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.settings.config import ServerConfig
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from tests.programs.e2e.riddles import WAIT
from tests.support.hf_check import check_with_transformers
from tests.support.runs import PLUGINS, REWARDS, Finished, make_dataset, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--train_iters", "2",
         "--save_steps", "100", "--max_tokens_per_micro_batch", "512", "--clip_grad", "100"]  # fmt: skip
NUMBERS = ("loss", "grad_norm", "reward", "num_turns")
TRAINED = ("prompt_ids", "completion_ids", "sampled", "conversation", "infos", "rewards", "text", "finish_reason")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "data.jsonl", rows=4)


def closed(folder: Path) -> list[str]:
    """Return the uuids of the conversations whose environment was closed."""
    return (folder / "closed.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def riddles(folder: Path, dense: Path) -> Iterator[RolloutServer]:
    """Start a server, which becomes ready while the first test trains with vLLM in the training processes."""
    flags = ["--multi_turn_scheduler", "gym_scheduler", "--gym_env", "riddles", "--max_turns", "3",
             "--external_plugins", str(PLUGINS / "riddles.py")]  # fmt: skip
    closed_log = {"RIDDLES_CLOSED": str(folder / "closed.txt")}
    server = RolloutServer(dense, folder / "riddles.txt", flags, closed_log).start()
    yield server
    server.stop()


def train(
    model: Path, dataset: Path, folder: Path, flags: Sequence[str], rewards: bool = True
) -> tuple[Finished, list[dict[str, Any]]]:
    """Return the run and the rollouts of its first step."""
    dump = folder.with_suffix(".rollouts")
    flags = [*FLAGS, "--rollout_dump", str(dump), *flags]
    run = megatron_rlhf(model, dataset, folder, 2, flags, {API_KEY_VARIABLE: KEY}, rewards=rewards)
    assert run.code == 0, run.output[-4000:]
    return run, read_json_lines(dump / "rollout-000000.jsonl")


def check_same(remote: tuple[Finished, list[dict[str, Any]]], local: tuple[Finished, list[dict[str, Any]]]) -> None:
    for row, expected in zip(remote[1], local[1], strict=True):
        assert {name: row[name] for name in TRAINED} == {name: expected[name] for name in TRAINED}
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
    for step, expected in zip(remote[0].log, local[0].log, strict=True):
        numbers, expected_numbers = ([values[name] for name in NUMBERS] for values in (step, expected))
        assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=1e-6)
    assert all(step["rollout/k3_kl"] < 1e-7 for run in (remote[0], local[0]) for step in run.log)


@pytest.mark.nightly
def test_an_environment_on_a_server_matches_colocate(
    folder: Path, dense: Path, dataset: Path, riddles: RolloutServer
) -> None:
    """The trainer's script is written as for ms-swift: only the server has flags for scheduler and environment."""
    reward = ["--reward_funcs", "turns"]
    local = train(dense, dataset, folder / "local", [
        "--multi_turn_scheduler", "gym_scheduler", "--gym_env", "riddles", "--max_turns", "3", *reward,
        "--external_plugins", str(PLUGINS / "riddles.py"), str(PLUGINS / "turns_reward.py")])  # fmt: skip
    riddles.wait()
    remote = train(dense, dataset, folder / "remote", [
        "--vllm_mode", "server", "--vllm_server_base_url", riddles.url, "--vllm_server_pass_dataset", "true", *reward,
        "--external_plugins", str(PLUGINS / "turns_reward.py")])  # fmt: skip
    check_same(remote, local)
    assert {row["infos"]["num_turns"] for row in remote[1]} == {1, 2, 3}
    tokenizer = AutoTokenizer.from_pretrained(dense)
    for row in remote[1]:
        # The environment's messages between the turns are not trained.
        not_sampled = compress(row["completion_ids"], map(not_, row["sampled"]))
        assert tokenizer.decode(list(not_sampled)).count("user\nUse ") == row["infos"]["num_turns"] - 1
        assert sum(row["sampled"]) == len(row["logprobs"])
        assert row["rewards"] == [row["infos"]["num_turns"], row["infos"]["total_reward"]]
    # including those ended by --max_turns, exactly once per conversation
    assert sorted(closed(folder)) == sorted({*closed(folder)}) and len(closed(folder)) == 16


def test_a_limit_of_all_turns_and_a_grammar_hold_on_server_and_ranks(
    folder: Path, dense: Path, dataset: Path, riddles: RolloutServer
) -> None:
    """Eight letters a turn: the third has what two have left of 20. On the server only its environment grades."""
    limits = ["--completion_length_limit_scope", "total", "--max_completion_length", "20", "--train_iters", "1",
              "--structured_outputs_regex", "[a-d]{8}"]  # fmt: skip
    _, local = train(dense, dataset, folder / "limited", [
        "--multi_turn_scheduler", "gym_scheduler", "--gym_env", "riddles", "--max_turns", "3", *limits,
        "--external_plugins", str(REWARDS), str(PLUGINS / "riddles.py")])  # fmt: skip
    riddles.wait()
    run, remote = train(dense, dataset, folder / "limited-remote", [
        "--vllm_mode", "server", "--vllm_server_base_url", riddles.url, *limits], rewards=False)  # fmt: skip
    for row, expected in zip(remote, local, strict=True):
        same = [name for name in TRAINED if name != "rewards"]
        assert {name: row[name] for name in same} == {name: expected[name] for name in same}
        assert row["rewards"] == [row["infos"]["total_reward"]]
    assert max(sum(row["sampled"]) for row in remote) == 20
    assert any(row["infos"]["num_turns"] == 3 and row["finish_reason"] == "length" for row in remote)
    assert "rewards/gym_reward/mean" in run.log[0]


@pytest.mark.slow
def test_conversations_are_generated_ahead_of_training(
    folder: Path, dense: Path, dataset: Path, riddles: RolloutServer
) -> None:
    riddles.wait()
    before = len(closed(folder)) if (folder / "closed.txt").exists() else 0
    run, _ = train(dense, dataset, folder / "ahead", [
        "--vllm_mode", "server", "--vllm_server_base_url", riddles.url, "--vllm_server_pass_dataset", "true",
        "--async_generate", "true", "--train_iters", "4", "--reward_funcs", "turns",
        "--external_plugins", str(PLUGINS / "turns_reward.py")])  # fmt: skip
    assert [step["rollout/staleness_max"] for step in run.log] == [0, 1, 1, 1]
    assert len(closed(folder)) - before == 4 * 8


def config_of(server: RolloutServer, model: Path) -> ServerConfig:
    return ServerConfig(
        urls=(server.url,), group_ports=(0,), timeout=10, request_timeout=60, api_key=KEY, bucket_bytes=2**20,
        needed_length=256, model=model_identity(read_model_config(model)),
        turns=RemoteTurnsConfig("--max_turns 3", max_turns=3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, r"it runs multi-turn conversations \(--multi_turn_scheduler gym_scheduler --max_turns 3"),
        (
            RemoteTurnsConfig("", scheduler="hints"),
            "its --multi_turn_scheduler is gym_scheduler, and this run's is hin",
        ),
        (RemoteTurnsConfig("", max_turns=4), "its --max_turns is 3, and this run's is 4; give both the same"),
    ],
)
def test_a_server_with_other_conversation_settings_is_refused(
    riddles: RolloutServer, dense: Path, settings: RemoteTurnsConfig | None, message: str
) -> None:
    riddles.wait()
    config = replace(config_of(riddles, dense), turns=settings)
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0)
    try:
        with pytest.raises(ValueError, match=message):
            engine.check()
    finally:
        engine.shutdown()


def test_a_cancelled_conversation_closes_its_environment(folder: Path, dense: Path, riddles: RolloutServer) -> None:
    """Both new weights and a second request for the same conversation cancel it."""
    riddles.wait()
    weights = load_file(dense / "model.safetensors")
    engine = RemoteVllm(config_of(riddles, dense), WeightSender(torch.device("cpu"), 2**20), rank=0)
    sampling = {"max_tokens": 4, "temperature": 1.0, "seed": 3}

    def complete(uuid: str, content: str) -> Any:
        request = {
            "messages": [{"role": "user", "content": content}],
            "uuid": uuid,
            "data_dict": {"letters": '"abcdefgh"'},
        }
        body = {"request": request, "sampling": sampling, "weights_version": 7}
        try:
            return Completion.from_json(riddles.request("POST", Routes.GENERATE, body, run=engine._servers.run))
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def complete_in_thread(responses: list[Any], uuid: str) -> Thread:
        thread = Thread(target=lambda: responses.append(complete(uuid, WAIT)))
        thread.start()
        time.sleep(2)
        return thread

    def send(version: int) -> None:
        engine.load_weights(weights.items(), version, None, collect_checksums=False)

    try:
        assert engine.check()  # True: the environment grades
        assert engine.needs_weights(7)
        send(7)
        responses: list[Any] = []
        first = complete_in_thread(responses, "waits")
        second = complete_in_thread(responses, "waits")  # as after a request timeout
        first.join(timeout=20)
        assert len(responses) == 1 and closed(folder)[-1] == "waits"
        other = complete("beside", "Hello.")
        assert other.infos["num_turns"] == len(other.messages) // 2 and True in other.sampled
        assert engine.needs_weights(8)
        send(8)
        second.join(timeout=20)
        assert len(responses) == 2 and all("cancelled" in response for response in responses)
        deadline = time.monotonic() + 10
        while closed(folder).count("waits") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert closed(folder).count("waits") == 2
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_a_scheduler_may_change_completions_and_never_finish(folder: Path, dense: Path, dataset: Path) -> None:
    """Tokens that it inserts or masks are not trained, and a conversation ends where no room is left."""
    turns = ["--multi_turn_scheduler", "hints", "--max_turns", "50"]
    plugins = [str(REWARDS), str(PLUGINS / "hints.py")]
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
    assert first["rewards/letters/mean"] > 0 and first["reward_std"] > 0  # rewards of the last completion that fitted
    check_with_transformers(first, dense, folder / "local hints.rollouts" / "rollout-000000.jsonl")
    for row in remote[1]:
        assert len(row["prompt_ids"]) + len(row["completion_ids"]) <= 256 + 40
        hint = b" wait, "
        assert row["sampled"][: 4 + len(hint)] == [True] * 4 + [False] * len(hint)
        assert row["finish_reason"] == "length" and row["infos"]["num_turns"] > 3
