"""Which servers, from ms-swift's flags; and what of them is refused before anybody is asked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from swift_megatron_grpo.arguments import server_checks as flags
from swift_megatron_grpo.config import ServerConfig
from swift_megatron_grpo.generation.remote.client import Refused
from swift_megatron_grpo.generation.remote.servers import problems_of, refusal
from swift_megatron_grpo.protocol.messages import PROTOCOL, Completion, ConversationSettings, ServerStatus


def test_servers_by_host_and_port_or_by_address() -> None:
    assert flags.server_urls(None, ["0.0.0.0", "::1"], [8000, 8001]) == ("http://127.0.0.1:8000", "http://[::1]:8001")
    assert flags.server_urls(["http://gpu7:8000/"], None, [8000]) == ("http://gpu7:8000",)


@pytest.mark.parametrize(
    ("urls", "hosts", "ports", "said"),
    [
        (None, None, [8000], "no server is named; use --vllm_server_host 127.0.0.1"),
        (["gpu7:8000"], None, [8000], "give it as http://HOST:8000"),
        (None, ["a", "b"], [8000], "--vllm_server_port has 1 values for the 2"),
        (None, ["a", "a"], [8000, 8000], "named twice"),
    ],
)
def test_servers_that_cannot_be(urls: Any, hosts: Any, ports: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flags.server_urls(urls, hosts, ports)


def test_group_ports_count_up_from_one() -> None:
    assert flags.group_ports(None, 2) == (0, 0)
    assert flags.group_ports([51216], 3) == (51216, 51217, 51218)
    with pytest.raises(ValueError, match="2 values for 3 servers"):
        flags.group_ports([1, 2], 3)


def test_flags_of_the_other_mode() -> None:
    defaults = {**flags._SERVER_ONLY, **flags._COLOCATE_ONLY}
    flags.check_mode("colocate", defaults)
    with pytest.raises(ValueError, match="--vllm_server_host is for --vllm_mode server"):
        flags.check_mode("colocate", {**defaults, "vllm_server_host": ["127.0.0.1"]})
    assert flags.notes("server", defaults) == []
    assert "--sleep_level: " in flags.notes("server", {**defaults, "sleep_level": 2})[0]


def test_what_servers_are_not_for() -> None:
    flags.check_combinations(None)
    with pytest.raises(ValueError, match="--rollout_replay folder generates nothing, so no server is asked"):
        flags.check_combinations("folder")


def test_which_flags_ask_for_conversations() -> None:
    left_out = {"multi_turn_scheduler": None, "max_turns": None, "gym_env": None, "use_gym_env": None,
                "vllm_server_pass_dataset": False}  # fmt: skip
    assert flags.turn_flags(left_out) is None
    assert flags.turn_flags({**left_out, "use_gym_env": False}) is None
    assert flags.turn_flags({**left_out, "vllm_server_pass_dataset": True}) == "--vllm_server_pass_dataset true"
    typed = {**left_out, "multi_turn_scheduler": "hints", "max_turns": 3}
    assert flags.turn_flags(typed) == "--multi_turn_scheduler hints --max_turns 3"


CONFIG = ServerConfig(
    urls=("http://a:8000",),
    group_ports=(0,),
    timeout=1,
    request_timeout=1,
    api_key="secret",
    bucket_bytes=1,
    needed_length=300,
    model={"hidden_size": 64, "architectures": ["Qwen3ForCausalLM"]},
)


GYM = ConversationSettings("gym_scheduler", max_turns=3, gym_env="riddles", use_gym_env=True)


def status(**said: Any) -> ServerStatus:
    usual: dict[str, Any] = {
        "plugin": "1.0", "protocol": PROTOCOL, "instance": "x", "run": None, "weights_version": -1, "world_size": 1,
        "max_model_len": 300, "max_num_seqs": 8, "max_logprobs": 20, "enable_lora": False, "max_lora_rank": 16,
        "conversations": None,
        "model": {"hidden_size": 64, "architectures": ["Qwen3ForCausalLM"], "vocab_size": 7},
    }  # fmt: skip
    return ServerStatus(**{**usual, **said})


def test_a_server_that_suits() -> None:
    assert problems_of(status(), CONFIG, PROTOCOL) == []
    assert "secret" not in repr(CONFIG)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"protocol": PROTOCOL + 1}, "install the same version"),
        ({"model": {"hidden_size": 128}}, "hidden_size is 128 there and 64 here"),
        ({"max_model_len": 256}, "start it with --vllm_max_model_len 300"),
        ({"max_logprobs": 0}, "cannot return the log-probs of sampled tokens"),
        ({"conversations": GYM}, "it runs multi-turn conversations"),
    ],
)
def test_a_server_that_does_not(said: dict[str, Any], problem: str) -> None:
    [told] = problems_of(status(**said), CONFIG, PROTOCOL)
    assert problem in told


def test_what_a_server_says_no_with() -> None:
    assert "pip install swift-megatron-grpo" in refusal("http://a", Refused(404, "Not Found"))
    assert "SWIFT_ROLLOUT_API_KEY" in refusal("http://a", Refused(401, "Missing bearer token"))


def test_a_completion_travels_bit_by_bit() -> None:
    answer = Completion([1, 2], [3, 4], [-0.10000000149011612, -5.632891654968262], "ab", "stop", 7)
    assert Completion.from_json(answer.to_json()) == answer


def test_a_conversation_travels_with_what_environments_say() -> None:
    infos = {"total_reward": np.float32(0.5), "steps": np.array([1, 2]), "worst": float("-inf")}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = Completion([1], [2, 3], [-0.5], "b", "stop", 7, [True, False], messages, infos)
    sent = json.dumps(answer.to_json(), allow_nan=False)  # as web servers write it
    told = Completion.from_json(json.loads(sent))
    assert told.sampled == [True, False] and told.messages == messages
    assert told.infos == {"total_reward": 0.5, "steps": [1, 2], "worst": float("-inf")}
    with pytest.raises(ValueError, match=r"rollout_infos of the conversation must be .* is of type set"):
        replace(answer, infos={"seen": {1}}).to_json()


def test_a_status_travels() -> None:
    for said in (status(), status(conversations=GYM)):
        assert ServerStatus.from_json(json.loads(json.dumps(asdict(said)))) == said
    older = {"protocol": PROTOCOL - 1, "plugin": "0.1", "multi_turn": False}
    assert "install the same version" in problems_of(ServerStatus.from_json(older), CONFIG, PROTOCOL)[0]
