"""Check the settings of vLLM in the training processes by building its configuration, before a model loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs

from swift_megatron_grpo.settings.config import VllmConfig
from swift_megatron_grpo.weights.load import quantization

_FLAG = "--vllm_engine_kwargs"


def check_engine_settings(config: VllmConfig) -> None:
    """Raise ValueError if vLLM refuses the settings. It reads the model's config for this, and no weights."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    dtype = str(config.dtype).removeprefix("torch.")
    device = quantization.refusal_of_device(capability, config.has_experts)
    quantization.check_quantization(config.quantization, config.lora_rank is not None, dtype, device)
    problem = _problem(config, config.engine_kwargs)
    if problem is None:
        return
    if config.returns_experts and _problem(replace(config, returns_experts=False), config.engine_kwargs) is None:
        raise ValueError(
            "vLLM cannot report the experts that its routers choose with these settings, and --router_replay_mode R3 "
            f"and --router_agreement_samples read them: {problem}; use --router_replay_mode R2 or disabled, and "
            "--router_agreement_samples 0"
        )
    if config.quantization != "none" and _problem(replace(config, quantization="none"), config.engine_kwargs) is None:
        raise ValueError(
            f"--rollout_quantization {config.quantization}: this vLLM refuses it: {problem}; install vLLM 0.25.1, or "
            "use --rollout_quantization none"
        )
    for name, value in config.engine_kwargs.items():
        others = {other: kept for other, kept in config.engine_kwargs.items() if other != name}
        if _problem(config, others) is None:
            raise ValueError(f"{_FLAG}: vLLM refuses {name} = {value!r}: {problem}; correct it, or leave it out")
    flags = f"--vllm_max_model_len {config.max_model_len} --vllm_max_num_seqs {config.max_num_seqs}"
    if config.engine_kwargs:
        flags += f" {_FLAG} with {', '.join(config.engine_kwargs)}"
    raise ValueError(f"vLLM refuses the settings of this run: {problem}; change {flags}")


def _problem(config: VllmConfig, engine_kwargs: Mapping[str, Any]) -> str | None:
    """Return vLLM's reason to refuse these settings; None: it accepts them."""
    with _without_traces():
        try:
            _engine_args(config, dict(engine_kwargs)).create_engine_config()
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            return _reason(error)
    return None


def shared_settings(config: VllmConfig) -> dict[str, Any]:
    """Return the settings that ms-swift's engine and vLLM's EngineArgs have under the same names."""
    return {
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "disable_cascade_attn": config.disable_cascade_attn,
        "limit_mm_per_prompt": config.limit_mm_per_prompt,
        "mm_processor_cache_gb": config.mm_processor_cache_gb,
        "enable_lora": config.lora_rank is not None,
        "max_lora_rank": config.lora_rank or 16,
        "distributed_executor_backend": "external_launcher",
        # log-probs of the distribution that was sampled: at this temperature, after top-p and top-k
        "logprobs_mode": "processed_logprobs",
    }


def further_settings(config: VllmConfig) -> dict[str, Any]:
    """Return the settings of this run that only vLLM has, which ms-swift's engine passes on."""
    reports = {"enable_return_routed_experts": True} if config.returns_experts else {}
    return {"hf_overrides": dict(config.hf_overrides), **reports, **quantization.engine_settings(config.quantization)}


def _engine_args(config: VllmConfig, engine_kwargs: dict[str, Any]) -> EngineArgs:
    """Return the arguments that ms-swift's engine will have; it leaves out what is None, too."""
    return EngineArgs(
        model=config.model_dir,
        dtype=str(config.dtype).removeprefix("torch."),
        seed=config.seed,
        trust_remote_code=True,
        **{name: value for name, value in shared_settings(config).items() if value is not None},
        **further_settings(config),
        **engine_kwargs,
    )


def _reason(error: Exception) -> str:
    """Return the first fault in one line; pydantic's errors have several lines, and the address of a manual."""
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{fault['msg']} ({'.'.join(map(str, fault['loc']))})"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _without_traces() -> Iterator[None]:
    """Restore the environment, which vLLM changes for the processes of an engine, and log warnings only."""
    logger, environment = logging.getLogger("vllm"), dict(os.environ)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
