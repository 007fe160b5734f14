"""Checks of single flags, on plain values. Each raises ValueError with the fault, the flag, and a value that works."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_megatron_grpo.conversations.registries import check_registered

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# ---- the model


def check_model_path(model: str, flag: str = "model", bare_ids: bool = False) -> None:
    """A local folder with a config.json, or what may be a hub's id; with `bare_ids` also one without a slash."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--{flag} {model}: the folder {path.resolve()} has no config.json, so it holds no model")
        return
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if not looks_local and (_HUB_ID.fullmatch(model) or bare_ids):
        return
    advice = "give a folder with a config.json, or a hub id of the form organisation/name"
    raise ValueError(f"--{flag} {model}: there is no folder {path.resolve()}{_similar_folders(path)}; {advice}")


def _similar_folders(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    siblings = [each.name for each in path.parent.iterdir() if each.is_dir()]
    close = difflib.get_close_matches(path.name, siblings)
    return f" (next to it: {', '.join(close)})" if close else ""


# ---- rewards


def check_reward_functions(names: Sequence[Any], known: Iterable[str]) -> None:
    """`names` as in --reward_funcs; a callable, from a script, needs no registry."""
    if not names:
        choices = ", ".join(sorted(known))
        raise ValueError(f"no reward function is set; use --reward_funcs with one or more of {choices}")
    check_registered("reward_funcs", [name for name in names if isinstance(name, str)], known, "swift.rewards.orms")


def check_reward_weights(weights: Sequence[float] | None, num_functions: int) -> None:
    if weights is not None and len(weights) != num_functions:
        raise ValueError(
            f"reward_weights has {len(weights)} values for {num_functions} reward functions; give --reward_weights one "
            "value for each, or leave it out"
        )


def check_plugin_files(paths: Sequence[str]) -> None:
    missing = [path for path in paths if not Path(path).expanduser().is_file()]
    if missing:
        raise ValueError(f"--external_plugins {missing[0]}: there is no file {Path(missing[0]).expanduser().resolve()}")


# ---- generation, training

VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def check_adapter_sync(
    enabled: bool, has_adapter: bool, rank: int, sleep_level: int, mcore_model: str | None, sync_check: str
) -> None:
    """--vllm_enable_lora: vLLM has the checkpoint and gets the adapter only."""
    if not enabled:
        return
    if not has_adapter:
        raise ValueError("--vllm_enable_lora true is for --tuner_type lora, and there is no adapter; leave it out")
    if rank > VLLM_LORA_RANKS[-1]:
        raise ValueError(
            f"--vllm_enable_lora true: vLLM takes adapters up to rank {VLLM_LORA_RANKS[-1]}, and --lora_rank is "
            f"{rank}; use --vllm_enable_lora false, which merges the adapter"
        )
    if mcore_model is not None:
        raise ValueError(
            "--vllm_enable_lora true: vLLM runs the adapter on --model, and the trainer on --mcore_model "
            f"{mcore_model}; use --vllm_enable_lora false, which sends merged weights"
        )
    if sleep_level == 2:
        raise ValueError(
            "--sleep_level 2 discards vLLM's weights, and with --vllm_enable_lora true only the adapter is sent again; "
            "use --sleep_level 1, or --vllm_enable_lora false"
        )
    if sync_check == "full":
        raise ValueError(
            "--sync_check full compares the tensors of a model, and with --vllm_enable_lora true vLLM scales and fuses "
            "those of the adapter; use --sync_check canary, or --vllm_enable_lora false"
        )


def check_lengths(max_length: int | None, max_completion_length: int, vllm_max_model_len: int | None) -> None:
    if max_completion_length < 1:
        raise ValueError(
            f"max_completion_length must be > 0, got {max_completion_length}; use --max_completion_length 512"
        )
    needed = (max_length or 1) + max_completion_length
    if vllm_max_model_len is not None and vllm_max_model_len < needed:
        prompt = "one token of prompt" if max_length is None else f"max_length ({max_length})"
        shorter = vllm_max_model_len - (max_length or 1)
        or_shorter = f", or --max_completion_length {shorter}" if shorter > 0 else ""
        raise ValueError(
            f"vllm_max_model_len ({vllm_max_model_len}) is shorter than {prompt} + max_completion_length "
            f"({max_completion_length}) = {needed}; use --vllm_max_model_len {needed}{or_shorter}"
        )


def check_vllm_installed() -> None:
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed and generates the completions; pip install "swift-megatron-grpo[gpu]"')


def check_duration(train_iters: int | None, num_train_epochs: int | None) -> None:
    if train_iters is None and num_train_epochs is None:
        raise ValueError("nothing says how long to train; use --num_train_epochs 1 or --train_iters 100")


def check_micro_batches(max_tokens: int | None, infer_max_tokens: int | None, infer_batch_size: int | None) -> None:
    for flag, value, suits in (
        ("max_tokens_per_micro_batch", max_tokens, 16384),
        ("infer_max_tokens_per_micro_batch", infer_max_tokens, 32768),
        ("infer_batch_size", infer_batch_size, 16),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}; use --{flag} {suits}, or leave it out")
    if infer_max_tokens is not None and infer_batch_size is not None:
        raise ValueError(
            f"--infer_max_tokens_per_micro_batch {infer_max_tokens} and --infer_batch_size {infer_batch_size} both say "
            "how large micro batches are that are only looked at; leave one of them out"
        )


def check_iterations(num_iterations: int) -> None:
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be > 0, got {num_iterations}; use --num_iterations 1")
