"""The flags of each run: those of the learning benchmark, and what the case changes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from benchmarks.harness.learning.settings import (
    CACHE,
    CACHE_BYTES,
    MODEL_TYPE,
    TEMPLATE,
    Paths,
    Settings,
    command_of,
)
from benchmarks.harness.shapes import SHAPES

from .cases import REMEDIES, Case, Variant

PLUGINS = Path(__file__).parent
LORA = "--tuner_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear"
ROOM_FOR_A_TOOL = 64  # tokens of its answer in each turn
DRY_CACHE_BYTES = 2**26
TRL_MICRO_BATCHES = 8  # of a step; with fewer, the logits of long completions would take half of the GPU


def trainer_flags(case: Case, variant: Variant, settings: Settings, paths: Paths, shape: str, url: str) -> list[str]:
    """Return the arguments of a run's program. `url`: of its server; empty: vLLM runs in the trainer."""
    flags = command_of(variant.arm, settings, paths, 1, TRL_MICRO_BATCHES)
    if variant.arm == "trl":
        return flags
    remedy = REMEDIES[case.remedy]
    plugins = [str(PLUGINS / "rewards.py"), *([str(PLUGINS / "lengths.py")] if shape else [])]
    flags += ["--external_plugins", *plugins, "--reward_funcs", "drawn", "--dataset_shuffle", "false",
              "--train_dataloader_shuffle", "false", "--vllm_max_model_len", str(model_tokens(case, settings)),
              *shlex.split(remedy.common), *shlex.split(variant.flags)]  # fmt: skip
    flags += random_weights(shape) if shape else []
    flags += ["--vllm_mode", "server", "--vllm_server_base_url", url] if url else []
    return flags


def random_weights(shape: str) -> list[str]:
    """Return what a trainer of random weights needs; vLLM sleeps, because 8B leaves too little room for a cache."""
    kwargs = json.dumps({"load_format": "dummy"} | ({CACHE: DRY_CACHE_BYTES} if _is_small(shape) else {}))
    return ["--model_type", SHAPES[shape].model_type, "--template", SHAPES[shape].template, "--check_model", "false",
            *shlex.split(LORA), "--attention_backend", "flash" if _is_small(shape) else "fused",
            "--vllm_gpu_memory_utilization", "0.3" if _is_small(shape) else "0.5", "--sleep_level", "1",
            "--vllm_engine_kwargs", kwargs]  # fmt: skip


def server_flags(case: Case, settings: Settings, model: Path, shape: str, port: int, shares_gpu: bool) -> list[str]:
    """Return the arguments of `swift rollout`. `shares_gpu`: with other runs, so that it may not take what is free."""
    kwargs: dict[str, object] = {"load_format": "dummy"} if shape else {}
    if shares_gpu or settings.eager:
        kwargs[CACHE] = DRY_CACHE_BYTES if settings.eager else CACHE_BYTES
    return ["--model", str(model), "--model_type", SHAPES[shape].model_type if shape else MODEL_TYPE,
            "--template", SHAPES[shape].template if shape else TEMPLATE, "--port", str(port),
            "--torch_dtype", settings.dtype, "--vllm_max_model_len", str(model_tokens(case, settings)),
            "--vllm_gpu_memory_utilization", "0.1" if shares_gpu else "0.3" if settings.eager else "0.8",
            "--vllm_enforce_eager", str(settings.eager).lower(),
            "--vllm_engine_kwargs", json.dumps(kwargs)]  # fmt: skip


def model_tokens(case: Case, settings: Settings) -> int:
    """Return the tokens of a whole conversation, at most."""
    turns = REMEDIES[case.remedy].turns
    return settings.prompt_tokens + turns * settings.completion_tokens + (turns - 1) * ROOM_FOR_A_TOOL


def _is_small(shape: str) -> bool:
    return shape.startswith("toy")
