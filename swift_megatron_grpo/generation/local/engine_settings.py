"""Check the settings of vLLM in the training processes by building its configuration, before a model loads."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version
from pydantic import ValidationError
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import EngineArgs

from swift_megatron_grpo.generation.vllm.images import knows_times_of_frames
from swift_megatron_grpo.generation.vllm.second_runner import draft_settings, refusal_of_history
from swift_megatron_grpo.settings.config import VllmConfig
from swift_megatron_grpo.weights.export.prediction_layers import is_prediction
from swift_megatron_grpo.weights.load import quantization
from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_FLAG = "--vllm_engine_kwargs"
_SAME_NAMES = (
    "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager",
    "enable_prefix_caching", "disable_cascade_attn", "limit_mm_per_prompt", "mm_processor_cache_gb",
)  # fmt: skip


def check_engine_settings(config: VllmConfig) -> None:
    """Raise ValueError if vLLM refuses the settings. It reads the model's config for this, and no weights."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    device = quantization.refusal_of_device(capability, config.has_experts)
    kind, dtype = config.rollout_quantization, _name(config.torch_dtype)
    quantization.check_quantization(kind, config.lora_rank is not None, dtype, device)
    if (config.vllm_limit_mm_per_prompt or {}).get("video") and not knows_times_of_frames(config.model_type):
        raise ValueError(
            "this vLLM places the frames of a Qwen2.5-VL without their times; install vLLM 0.32 to train it on videos, "
            "or remove the column videos"
        )
    if config.predicts_drafts and not any(map(is_prediction, stored_tensors(config.model_dir))):
        raise ValueError(
            f"--speculative_rollouts mtp: {config.model_dir} has no layers of multi-token prediction (mtp.*); use the "
            "released checkpoint, or --speculative_rollouts off"
        )
    problem = _problem(config)
    if problem is None:
        return
    if config.returns_experts and _problem(replace(config, returns_experts=False)) is None:
        raise ValueError(
            "vLLM cannot report the experts that its routers choose with these settings, and --router_replay_mode R3 "
            f"and --router_agreement_samples read them: {problem}; use --router_replay_mode R2 or disabled, and "
            "--router_agreement_samples 0"
        )
    if kind != "none" and _problem(replace(config, rollout_quantization="none")) is None:
        raise ValueError(
            f"--rollout_quantization {kind}: this vLLM refuses it: {problem}; install vLLM 0.25.1, or use "
            "--rollout_quantization none"
        )
    if config.drafts and _problem(replace(config, drafts=0, predicts_drafts=False)) is None:
        source = "mtp" if config.predicts_drafts else "history"
        raise ValueError(
            f"--speculative_rollouts {source}: this vLLM refuses it with these settings: {problem}; use "
            "--speculative_rollouts off"
        )
    kwargs = config.vllm_engine_kwargs
    for name in kwargs:
        others = {other: kwargs[other] for other in kwargs if other != name}
        if _problem(replace(config, vllm_engine_kwargs=others)) is None:
            raise ValueError(f"{_FLAG}: vLLM refuses {name} = {kwargs[name]!r}: {problem}; correct it, or leave it out")
    flags = f"--vllm_max_model_len {config.vllm_max_model_len} --vllm_max_num_seqs {config.vllm_max_num_seqs}"
    if kwargs:
        flags += f" {_FLAG} with {', '.join(kwargs)}"
    raise ValueError(f"vLLM refuses the settings of this run: {problem}; change {flags}")


def _problem(config: VllmConfig) -> str | None:
    """Return vLLM's reason to refuse these settings in one line; None: it accepts them."""
    on_gpu = torch.cuda.is_available()
    if config.drafts and not config.predicts_drafts and (reason := refusal_of_history(vllm_version, on_gpu)):
        return reason
    with _without_traces():
        try:
            engine = EngineArgs(  # as ms-swift's engine builds them: it leaves out what is None, too
                model=config.model_dir,
                dtype=_name(config.torch_dtype),
                seed=config.seed,
                trust_remote_code=True,
                **{name: value for name, value in shared_settings(config).items() if value is not None},
                **further_settings(config),
                **config.vllm_engine_kwargs,
            ).create_engine_config()
        except ValidationError as error:  # several lines, and the address of a manual
            fault = error.errors()[0]
            return f"{fault['msg']} ({'.'.join(map(str, fault['loc']))})"
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            return " ".join(str(error).split()) or type(error).__name__
    if config.predicts_drafts:
        return refusal_of_predictions(vllm_version, on_gpu, engine.use_v2_model_runner)
    return None


def refusal_of_predictions(version: str, on_gpu: bool, second_runner: bool) -> str | None:
    """Return why this vLLM does not keep the states of linear attention with drafts apart; None: it does."""
    if Version(version) < Version("0.32"):
        return (
            f"vLLM {version} continues from the state before accepted drafts in a step without drafts (its issue "
            "39273), and vLLM 0.32 does not"
        )
    if on_gpu and not second_runner:
        return f"vLLM {version} runs this model in its first runner, which counts drafts after it has sampled on a GPU"
    return None


def shared_settings(config: VllmConfig) -> dict[str, Any]:
    """Return the settings that ms-swift's engine and vLLM's EngineArgs have under the same names."""
    return {name: getattr(config, f"vllm_{name}") for name in _SAME_NAMES} | {
        "enable_lora": config.lora_rank is not None,
        "max_lora_rank": config.lora_rank or 16,
        "distributed_executor_backend": "external_launcher",
        # log-probs of the distribution that was sampled: at this temperature, after top-p and top-k
        "logprobs_mode": "processed_logprobs",
    }


def further_settings(config: VllmConfig) -> dict[str, Any]:
    """Return the settings of this run that only vLLM has, which ms-swift's engine passes on."""
    reports = {"enable_return_routed_experts": True} if config.returns_experts else {}
    quantized = quantization.engine_settings(config.rollout_quantization)
    drafts = draft_settings(config.drafts, config.vllm_max_num_seqs, config.predicts_drafts)
    return {"hf_overrides": dict(config.hf_overrides), **reports, **quantized, **drafts}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _without_traces() -> Iterator[None]:
    """Restore what vLLM changes in the environment for the processes of an engine, and log errors only.

    Other variables are not touched: a thread of NCCL that reads one at that moment would crash the rank.
    """
    logger, environment = logging.getLogger("vllm"), dict(os.environ)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items() - os.environ.items():
            os.environ[name] = value
