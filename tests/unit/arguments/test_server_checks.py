"""Flags of rollout servers, the status that a server must report, and the messages that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from swift_megatron_grpo.generation.protocol.messages import PROTOCOL, Completion, ConversationSettings, ServerStatus
from swift_megatron_grpo.generation.remote.compatibility import notes_on, problems_of, refusal
from swift_megatron_grpo.runtime.http import Refused
from swift_megatron_grpo.settings.config import ServerConfig
from swift_megatron_grpo.settings.servers import Engine, RemoteTurnsConfig, Servers
from tests.unit.settings.flags import faults, of


def servers(urls: Any = None, hosts: Any = None, ports: Any = (8000,), **typed: Any) -> dict[str, Any]:
    addresses = {"vllm_server_base_url": urls, "vllm_server_host": hosts, "vllm_server_port": list(ports)}
    return {"vllm_mode": "server", "reward_funcs": ["format"]} | addresses | typed


def test_server_addresses_are_built_from_hosts_and_ports_or_from_urls() -> None:
    hosts = of(Servers, **servers(None, ["0.0.0.0", "::1"], [8000, 8001])).urls
    assert hosts == ("http://127.0.0.1:8000", "http://[::1]:8001")
    assert of(Servers, **servers(["http://gpu7:8000/"])).urls == ("http://gpu7:8000",)


@pytest.mark.parametrize(
    ("urls", "hosts", "ports", "message"),
    [
        (None, None, [8000], "needs the address of a running `swift rollout`; use --vllm_server_host 127.0.0.1"),
        (["gpu7:8000"], None, [8000], "use the form http://HOST:8000"),
        (None, ["a", "b"], [8000], "--vllm_server_port has 1 values for the 2"),
        (None, ["a", "a"], [8000, 8000], "listed twice"),
    ],
)
def test_invalid_server_addresses_are_refused(urls: Any, hosts: Any, ports: Any, message: str) -> None:
    assert message in faults(Servers, **servers(urls, hosts, ports))


def test_a_single_group_port_is_incremented_per_server() -> None:
    def ports(given: Any, count: int) -> Any:
        return servers([f"http://gpu{i}:8000" for i in range(count)], vllm_server_group_port=given)

    assert of(Servers, **ports(None, 2)).group_ports == (0, 0)
    assert of(Servers, **ports([51216], 3)).group_ports == (51216, 51217, 51218)
    assert of(Servers, **ports([0], 3)).group_ports == (0, 0, 0)
    assert "2 values for 3 servers" in faults(Servers, **ports([1, 2], 3))


def test_flags_of_the_other_mode_are_refused_or_noted() -> None:
    assert faults(Servers) == ""
    assert "--vllm_server_host requires --vllm_mode server" in faults(Servers, vllm_server_host=["127.0.0.1"])
    assert of(Engine, vllm_mode="server").notes() == []
    assert "--sleep_level: " in of(Engine, vllm_mode="server", sleep_level=2).notes()[0]


def test_a_replay_excludes_servers() -> None:
    assert faults(Servers, **servers(hosts=["a"])) == ""
    message = faults(Servers, **servers(hosts=["a"], rollout_replay="folder"))
    assert "--rollout_replay folder does not generate, so no server is needed" in message


def test_flags_that_request_conversations_are_listed_as_typed() -> None:
    def requested(**typed: Any) -> str | None:
        turns = of(Servers, **servers(hosts=["a"], **typed)).turns
        return None if turns is None else turns.requested_by

    assert requested() is None
    assert requested(use_gym_env=False) is None
    assert requested(vllm_server_pass_dataset=True) == "--vllm_server_pass_dataset true"
    assert requested(multi_turn_scheduler="hints", max_turns=3) == "--multi_turn_scheduler hints --max_turns 3"


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


def status(**changes: Any) -> ServerStatus:
    usual: dict[str, Any] = {
        "plugin": "1.0", "protocol": PROTOCOL, "instance": "x", "run": None, "weights_version": -1, "world_size": 1,
        "max_model_len": 300, "max_num_seqs": 8, "max_logprobs": 20, "enable_lora": False, "max_lora_rank": 16,
        "held_media": (),
        "images_per_prompt": 0,
        "recordings_per_prompt": 0,
        "videos_per_prompt": 0,
        "quantization": "none",
        "batch_invariant": False,
        "drafts": 0,
        "returns_experts": False,
        "updates_in_flight": True,
        "conversations": None,
        "model": {"hidden_size": 64, "architectures": ["Qwen3ForCausalLM"], "vocab_size": 7},
    }  # fmt: skip
    return ServerStatus(**{**usual, **changes})


def test_a_suitable_server_is_accepted() -> None:
    assert problems_of(status(), CONFIG) == []
    assert "secret" not in repr(CONFIG)


def test_a_server_without_experts_is_refused_only_if_the_run_reads_them() -> None:
    reads = replace(CONFIG, returns_experts=True)
    [message] = problems_of(status(), reads)
    assert "does not report the experts" in message and '{"enable_return_routed_experts": true}' in message
    assert problems_of(status(returns_experts=True), reads) == []
    assert problems_of(status(returns_experts=True), CONFIG) == []


def test_a_server_whose_batches_matter_is_refused_only_by_a_run_that_asks() -> None:
    invariant = replace(CONFIG, batch_invariant=True)
    [message] = problems_of(status(), invariant)
    assert message.endswith("start it with --batch_invariant true")
    assert problems_of(status(batch_invariant=True), invariant) == []
    assert problems_of(status(batch_invariant=True), CONFIG) == []


def test_a_server_verifies_as_many_drafts_as_the_run_asks_for() -> None:
    drafted = replace(CONFIG, drafts=4)
    assert problems_of(status(drafts=4), drafted) == []
    for there in (0, 2):
        [message] = problems_of(status(drafts=there), drafted)
        assert message.endswith("start it with --speculative_rollouts history --speculative_tokens 4")
    [message] = problems_of(status(drafts=4), CONFIG)
    assert message.endswith("start it with --speculative_rollouts off")


def test_a_server_of_several_devices_receives_no_weights_in_flight() -> None:
    several = status(updates_in_flight=False)
    [message] = problems_of(several, replace(CONFIG, updates_in_flight=True))
    assert "loads weights only while it generates nothing" in message and "one `swift rollout` per GPU" in message
    assert problems_of(several, CONFIG) == [] == problems_of(status(), replace(CONFIG, updates_in_flight=True))


@pytest.mark.parametrize("kind", ["images", "videos", "recordings"])
def test_an_agent_on_a_server_is_refused_for_rows_with_media(kind: str) -> None:
    run = replace(CONFIG, turns=RemoteTurnsConfig(None), **{kind: 1})
    takes = {"images_per_prompt": 1, "videos_per_prompt": 1, "recordings_per_prompt": 1}
    [message] = problems_of(status(**takes, conversations=replace(GYM, reads_media=False)), run)
    assert message.startswith("it runs an agent, whose calls have messages of text")
    assert problems_of(status(**takes, conversations=GYM), run) == []
    assert problems_of(status(conversations=replace(GYM, reads_media=False)), replace(run, **{kind: 0})) == []


def test_a_server_that_answers_groups_excludes_a_limit_of_each() -> None:
    run = replace(CONFIG, turns=RemoteTurnsConfig(None), limits_conversations=True)
    tree = status(conversations=replace(GYM, answers_groups=True))
    [message] = problems_of(tree, run)
    assert "--completion_length_limit_scope total limits each; use per_round" in message
    assert problems_of(tree, replace(run, limits_conversations=False)) == []
    assert problems_of(status(conversations=GYM), run) == []


@pytest.mark.parametrize(("here", "there"), [("fp8", "none"), ("none", "fp8")])
def test_a_server_that_quantizes_otherwise_is_refused(here: Any, there: str) -> None:
    run = replace(CONFIG, quantization=here)
    [message] = problems_of(status(quantization=there), run)
    assert f"its --rollout_quantization is {there}, and that of this run is {here}; start it with" in message
    assert problems_of(status(quantization=here), run) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"protocol": PROTOCOL + 1}, "install the same version"),
        ({"model": {"hidden_size": 128}}, "hidden_size is 128 there and 64 here"),
        ({"max_model_len": 128}, "start it with --vllm_max_model_len 300"),
        ({"max_logprobs": 0}, "cannot return the log-probs of sampled tokens"),
        ({"conversations": GYM}, "it runs multi-turn conversations"),
    ],
)
def test_an_unsuitable_server_is_refused(changes: dict[str, Any], problem: str) -> None:
    [message] = problems_of(status(**changes), CONFIG)
    assert problem in message


def test_a_server_that_cuts_completions_is_accepted_with_a_note() -> None:
    short = status(max_model_len=256)
    assert problems_of(short, CONFIG) == []
    [note] = notes_on(short, CONFIG)
    assert "its vllm_max_model_len (256) is less than max_length and max_completion_length together (300)" in note
    assert notes_on(status(), CONFIG) == []


def test_a_rejected_status_request_is_explained() -> None:
    assert "run `pip install .` in a clone" in refusal("http://a", Refused(404, "Not Found"))
    assert "SWIFT_ROLLOUT_API_KEY" in refusal("http://a", Refused(401, "Missing bearer token"))


def test_a_completion_survives_json_bit_by_bit() -> None:
    completion = Completion([1, 2], [3, 4], [-0.10000000149011612, -5.632891654968262], "ab", "stop", 7)
    assert Completion.from_json(completion.to_json()) == completion


def test_a_conversation_survives_json_with_its_environments_infos() -> None:
    infos = {"total_reward": np.float32(0.5), "steps": np.array([1, 2]), "worst": float("-inf")}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    completion = Completion([1], [2, 3], [-0.5], "b", "stop", 7, sampled=[True, False], messages=messages, infos=infos)
    body = json.dumps(completion.to_json(), allow_nan=False)  # as web servers encode it
    received = Completion.from_json(json.loads(body))
    assert received.sampled == [True, False] and received.messages == messages
    assert received.infos == {"total_reward": 0.5, "steps": [1, 2], "worst": float("-inf")}
    with pytest.raises(ValueError, match=r"rollout_infos of the conversation must be .* is of type set"):
        replace(completion, infos={"seen": {1}}).to_json()


def test_a_status_survives_json() -> None:
    for sent in (status(), status(conversations=GYM)):
        assert ServerStatus.from_json(json.loads(json.dumps(asdict(sent)))) == sent
    older = {"protocol": PROTOCOL - 1, "plugin": "0.1", "multi_turn": False}
    assert "install the same version" in problems_of(ServerStatus.from_json(older), CONFIG)[0]
