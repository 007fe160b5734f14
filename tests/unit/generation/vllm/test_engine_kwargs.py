"""Settings of --vllm_engine_kwargs pass, are refused with a reason, or are unknown; bad JSON is never repaired."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.generation.vllm.engine_kwargs import (
    EXPERTS,
    REFUSED,
    REFUSED_BY_SERVERS,
    parse_json_object,
    passed_on,
    settings_of_vllm,
)


def refuse(settings: dict[str, object], adapter_only: bool = False, refused: Mapping[str, str] = REFUSED) -> str:
    with pytest.raises(ValueError) as caught:
        passed_on(settings, adapter_only, {}, refused)
    return str(caught.value)


def test_refused_settings_are_settings_of_the_installed_vllm() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in fields(EngineArgs)}
    assert names == settings_of_vllm()
    if not torch.cuda.is_available():  # the newest vLLM that is tested
        absent = {refused for refused in REFUSED if refused not in names and not _is_family(refused, names)}
        assert absent == {"override_attention_dtype"}, "only vLLM 0.23 has this one"


def _is_family(refused: str, names: set[str]) -> bool:
    return refused.endswith("_") and any(name.startswith(refused) for name in names)


def test_settings_of_speed_memory_and_logs_pass() -> None:
    names = ["max_num_batched_tokens", "kv_cache_dtype", "compilation_config", "scheduling_policy", "watermark"]
    for settings in (dict.fromkeys(names, 1), {"load_format": "dummy", "max_logprobs": 5}):
        assert passed_on(settings, "load_format" not in settings, {}) == settings


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ({"data_parallel_size": 1}, {}),
        ({"pipeline_parallel_size": 1, "enable_expert_parallel": False, "speculative_config": None}, {}),
        ({"hf_overrides": {}, "trust_remote_code": True, "cpu_offload_gb": 0}, {}),
        (
            {"tensor_parallel_size": 2, "enforce_eager": True},
            {"vllm_tensor_parallel_size": 2, "vllm_enforce_eager": True},
        ),
        ({"quantization": None, "dtype": "bfloat16"}, {"rollout_quantization": "none", "torch_dtype": "bfloat16"}),
        ({"enable_sleep_mode": True}, {"sleep_level": 2}),
    ],
)
def test_a_setting_that_an_engine_has_anyway_is_left_out(setting: dict[str, object], flags: dict[str, object]) -> None:
    assert passed_on({**setting, "max_num_batched_tokens": 64}, False, flags) == {"max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ({"data_parallel_size": 2}, {}),
        ({"data_parallel_size": 1}, {"vllm_data_parallel_size": 4}),
        ({"trust_remote_code": False}, {}),
        ({"tensor_parallel_size": 1}, {"vllm_tensor_parallel_size": 2}),
        ({"mm_processor_cache_gb": 0}, {"vllm_mm_processor_cache_gb": None}),
        ({"enable_sleep_mode": False}, {"sleep_level": 1}),
        ({"enable_return_routed_experts": True}, {"router_replay_mode": "R2"}),
    ],
)
def test_another_value_than_an_engine_has_is_refused(setting: dict[str, object], flags: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--vllm_engine_kwargs: "):
        passed_on(setting, False, flags)


def test_every_setting_of_a_family_is_refused() -> None:
    assert "draft tokens" in refuse({"spec_tokens": 3})
    assert "training ranks" in refuse({"data_parallel_rpc_port": 3})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_settings_are_named_with_the_reason_and_a_way_out(name: str) -> None:
    message = refuse({name: 7})
    assert message.startswith(f"--vllm_engine_kwargs: {name}: {REFUSED[name]}")
    assert "leave it out" in message or "use --" in message


def test_settings_that_a_flag_sets_name_the_flag() -> None:
    assert refuse({"tensor_parallel_size": 2}) == "--vllm_engine_kwargs: tensor_parallel_size: use " + (
        "--vllm_tensor_parallel_size"
    )
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    flags = {why.removeprefix("use --") for why in REFUSED.values() if why.startswith("use --")}
    assert flags <= set(GRPOArguments.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(REFUSED_BY_SERVERS))
def test_servers_refuse_the_same_settings_and_name_their_own_flags(name: str) -> None:
    from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments

    message = refuse({name: 7}, refused=REFUSED_BY_SERVERS)
    why = REFUSED_BY_SERVERS[name]
    assert set(REFUSED_BY_SERVERS) == set(REFUSED) - {EXPERTS}
    assert message.startswith(f"--vllm_engine_kwargs: {name}: {why}")
    assert "training ranks" not in why and "sleep_level" not in why
    flags = re.findall(r"use --(\w+)", why)
    assert set(flags) <= set(GRPORolloutArguments.__dataclass_fields__)


def test_an_unknown_setting_is_refused_with_the_nearest_names() -> None:
    assert "did you mean max_num_batched_tokens" in refuse({"max_num_batch_tokens": 8192})
    assert "a: vLLM has no such setting; leave it out" in refuse({"a": 1})


def test_values_that_break_weights_or_log_probs_are_refused() -> None:
    assert "load_format 'bitsandbytes' does not load the weights of --model as they are" in refuse(
        {"load_format": "bitsandbytes"}
    )
    assert "or use --vllm_enable_lora false" in refuse({"load_format": "dummy"}, adapter_only=True)
    assert "max_logprobs 0 refuses the log-probs" in refuse({"max_logprobs": 0})


def test_malformed_json_is_refused_with_its_position(tmp_path: Path) -> None:
    flag = "vllm_engine_kwargs"
    with pytest.raises(ValueError, match=r"at line 1, column 2, near '\{bad json'; use the form --vllm_engine_kwargs"):
        parse_json_object(flag, "{bad json")
    with pytest.raises(ValueError, match=r'is not a JSON object but \["a"\]'):
        parse_json_object(flag, '["a"]')
    path = tmp_path / "settings.json"
    path.write_text('{"a": 1,\n "b": }')
    with pytest.raises(ValueError, match=r"the file .*settings.json is not JSON: .* at line 2, column 7"):
        parse_json_object(flag, str(path))
    path.write_text('{"a": 1}')
    assert parse_json_object(flag, str(path)) == parse_json_object(flag, '{"a": 1}') == {"a": 1}
    assert parse_json_object(flag, None) == {}


def test_servers_report_experts_and_colocate_names_the_flag() -> None:
    setting = {"enable_return_routed_experts": True}
    assert "use --router_replay_mode" in refuse(setting)
    passed_on(setting, False, {}, REFUSED_BY_SERVERS)
    with pytest.raises(ValueError, match="enable_return_routed_experts must be true or false, got 'yes'"):
        passed_on({"enable_return_routed_experts": "yes"}, False, {}, REFUSED_BY_SERVERS)
