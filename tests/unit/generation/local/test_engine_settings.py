"""Settings that vLLM does not accept are refused before a model loads, by the name of the setting."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.settings.config import VllmConfig
from swift_megatron_grpo.weights.load import quantization
from tests.unit.model_config import QWEN3


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    """The settings of a run on one rank. The folder holds no weights: nothing here reads any."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return VllmConfig(
        vllm_mode="colocate",
        model_dir=str(tmp_path),
        model_type="qwen3",
        torch_dtype=torch.bfloat16,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_len=256,
        vllm_max_num_seqs=8,
        vllm_enforce_eager=True,
        vllm_engine_kwargs={"max_num_batched_tokens": 512},
        seed=1,
    )


def refuse(config: VllmConfig, **changes: Any) -> str:
    from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings

    with pytest.raises(ValueError) as caught:
        check_engine_settings(replace(config, **changes))
    return str(caught.value)


def test_valid_settings_pass_and_leave_the_process_as_it_was(config: VllmConfig) -> None:
    from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings

    environment, state = dict(os.environ), torch.get_rng_state()
    check_engine_settings(config)
    check_engine_settings(replace(config, lora_rank=8))
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), state)


def test_drafts_that_vllm_refuses_name_the_flag(config: VllmConfig) -> None:
    from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings

    check_engine_settings(replace(config, drafts=4))
    message = refuse(config, drafts=4, vllm_engine_kwargs={"async_scheduling": True})
    assert message.startswith("--speculative_rollouts history: this vLLM refuses it with these settings: ")
    assert message.endswith("use --speculative_rollouts off")


def test_a_checkpoint_without_layers_that_predict_is_refused(config: VllmConfig) -> None:
    message = refuse(config, drafts=4, predicts_drafts=True)
    assert message.startswith("--speculative_rollouts mtp: ") and "no layers of multi-token prediction" in message
    assert message.endswith("use the released checkpoint, or --speculative_rollouts off")


def test_versions_that_lose_states_behind_drafts_are_refused_by_name() -> None:
    from swift_megatron_grpo.generation.local.engine_settings import refusal_of_predictions

    old, first = (refusal_of_predictions(*case) or "" for case in (("0.25.1", True, True), ("0.32.0", True, False)))
    assert old.startswith("vLLM 0.25.1 continues from the state before") and "vLLM 0.32 does not" in old
    assert first.startswith("vLLM 0.32.0 runs this model in its first runner")
    assert refusal_of_predictions("0.32.0", True, True) is refusal_of_predictions("0.33.0+cpu", False, False) is None


def test_drafts_from_texts_are_refused_where_only_the_slow_runner_has_them(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swift_megatron_grpo.generation.local import engine_settings
    from swift_megatron_grpo.generation.vllm.second_runner import refusal_of_history

    assert "first model runner alone" in (refusal_of_history("0.25.1", True) or "")
    assert refusal_of_history("0.32.0", True) is refusal_of_history("0.25.1", False) is None
    monkeypatch.setattr(engine_settings, "refusal_of_history", lambda *_: refusal_of_history("0.25.1", True))
    message = refuse(config, drafts=4)
    assert message.startswith("--speculative_rollouts history: this vLLM refuses it") and message.endswith(
        "rollouts off"
    )


def test_quantization_that_the_device_cannot_run_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "this GPU has compute capability 8.0, and FP8 needs 8.9" in refuse(config, rollout_quantization="fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "vLLM has no FP8 mixture of experts on a CPU" in refuse(config, rollout_quantization="fp8", has_experts=True)


def test_quantization_that_vllm_refuses_is_named(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings

    check_engine_settings(replace(config, rollout_quantization="fp8"))
    assert "--torch_dtype is float32" in refuse(config, rollout_quantization="fp8", torch_dtype=torch.float32)
    monkeypatch.setattr(quantization, "FP8", "fp8_per_row")
    message = refuse(config, rollout_quantization="fp8")
    assert message.startswith("--rollout_quantization fp8: this vLLM refuses it: ") and "fp8_per_row" in message
    assert message.endswith("install vLLM 0.25.1, or use --rollout_quantization none")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_num_batched_tokens", -1, "Input should be greater than or equal to 1"),
        ("kv_cache_memory_bytes", "1G", "Input should be a valid integer"),
        ("kv_cache_dtype", "fp7", "Input should be 'auto'"),
        ("attention_backend", "nothing", "Unknown attention backend"),
        ("compilation_config", {"mode": 9}, "Input should be 0, 1, 2 or 3"),
    ],
)
def test_a_wrong_setting_of_vllm_is_named(config: VllmConfig, name: str, value: Any, reason: str) -> None:
    message = refuse(config, vllm_engine_kwargs={"use_tqdm_on_load": False, name: value})
    assert message.startswith(f"--vllm_engine_kwargs: vLLM refuses {name} = {value!r}: {reason}")
    assert message.endswith("; correct it, or leave it out") and "\n" not in message


def test_a_context_longer_than_the_models_is_refused_with_its_flag(config: VllmConfig) -> None:
    message = refuse(config, vllm_max_model_len=8192)
    assert "8192" in message and "4096" in message and "--vllm_max_model_len 8192" in message
