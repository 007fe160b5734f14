"""Checks of single flags, on plain values.

Each raises a ValueError that names the fault, the flag, and a value that works.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_megatron_grpo.arguments.advice import typed_value
from swift_megatron_grpo.generation.conversations.checks import check_registered

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# ---- the model


def check_model_path(model: str, flag: str = "model", bare_ids: bool = False) -> None:
    """Accept a folder with a config.json, or a string that may be a hub id; with `bare_ids` also without a slash."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--{flag} {model}: the folder {path.resolve()} has no config.json, so it is not a model; use the "
                "folder of a checkpoint of transformers"
            )
        return
    if looks_like_hub_id(model, bare_ids):
        return
    advice = "use a folder with a config.json, or a hub id of the form organisation/name"
    raise ValueError(f"--{flag} {model}: the folder {path.resolve()} does not exist{_similar_folders(path)}; {advice}")


def looks_like_hub_id(typed: str, bare_ids: bool = False) -> bool:
    """Return True for organisation/name, unless there is such a folder."""
    looks_local = typed.startswith(("/", "./", "../", "~")) or typed.count("/") > 1 or Path(typed).exists()
    return not looks_local and (_HUB_ID.fullmatch(typed) is not None or bare_ids)


def _similar_folders(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.is_dir()]
    close = difflib.get_close_matches(path.name, siblings)
    return f" (next to it: {', '.join(close)})" if close else ""


# ---- rewards


def check_reward_functions(names: Sequence[Any], known: Iterable[str]) -> None:
    """Check the names in --reward_funcs; callables, which a script may pass, need no registry."""
    if not names:
        choices = ", ".join(sorted(known))
        raise ValueError(f"no reward function is set; use --reward_funcs with one or more of {choices}")
    check_registered("reward_funcs", [name for name in names if isinstance(name, str)], known, "swift.rewards.orms")


def check_reward_weights(weights: Sequence[float] | None, num_functions: int) -> None:
    """Check that there is one finite weight per reward function, and that one of them is not 0."""
    if weights is None:
        return
    if len(weights) != num_functions:
        raise ValueError(
            f"reward_weights has {len(weights)} values for {num_functions} reward functions; set --reward_weights to "
            "one value for each, or leave it out"
        )
    advice = f"use --reward_weights {' '.join('1' for _ in weights)}, or leave it out"
    typed = f"--reward_weights {' '.join(f'{weight:g}' for weight in weights)}"
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"{typed}: weights must be finite numbers; {advice}")
    if not any(weights):
        raise ValueError(f"{typed}: every reward would be 0, so nothing would be trained; {advice}")


def import_plugins(flag: str, paths: Sequence[str], load: Callable[[str], object]) -> None:
    """Import the files of --external_plugins or --custom_register_path, which may raise anything."""
    missing = [path for path in paths if not Path(path).expanduser().is_file()]
    if missing:
        path = Path(missing[0]).expanduser().resolve()
        raise ValueError(f"--{flag} {missing[0]}: the file {path} does not exist; use another path")
    for file in paths:
        try:
            load(file)
        except Exception as error:
            raise ValueError(
                f"--{flag} {file}: importing it raises {type(error).__name__}: {error}; use a file that "
                f"`python {file}` runs"
            ) from error


def check_soft_overlong(names: Sequence[Any], cache: int | None, longest: int) -> None:
    """Check the length that the reward function soft_overlong needs. `longest`: completion."""
    if "soft_overlong" in names and (cache is None or cache >= longest):
        fault = "is not set" if cache is None else f"{cache} is not below the longest completion, {longest}"
        raise ValueError(
            f"--soft_cache_length {fault}: --reward_funcs soft_overlong penalises the last tokens before the limit; "
            f"use --soft_cache_length {max(1, longest // 4)}"
        )


def check_reward_classes(names: Sequence[Any], registered: Mapping[str, Any]) -> None:
    """Refuse a registered reward that is no class: ms-swift calls the entry with `args` to create the function."""
    for name in names:
        entry = registered[name] if isinstance(name, str) else None
        takes_completions = inspect.isfunction(entry) and "completions" in inspect.signature(entry).parameters
        if entry is not None and (takes_completions or not callable(entry)):
            raise ValueError(
                f"--reward_funcs {name}: orms[{name!r}] is of type {type(entry).__name__}, and ms-swift creates an "
                f"object from it; use a class with __call__(self, completions, **kwargs) in its place"
            )


# ---- generation, training

VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def check_adapter_sync(
    enabled: bool, has_adapter: bool, rank: int, sleep_level: int, mcore_model: str | None, sync_check: str
) -> None:
    """Check --vllm_enable_lora, with which vLLM loads the checkpoint and receives only the adapter."""
    if not enabled:
        return
    if not has_adapter:
        raise ValueError(
            "--vllm_enable_lora true requires --tuner_type lora, and this run has no adapter; leave it out"
        )
    if rank > VLLM_LORA_RANKS[-1]:
        raise ValueError(
            f"--vllm_enable_lora true: vLLM supports adapters up to rank {VLLM_LORA_RANKS[-1]}, and --lora_rank is "
            f"{rank}; use --vllm_enable_lora false, which merges the adapter"
        )
    if mcore_model is not None:
        raise ValueError(
            "--vllm_enable_lora true: vLLM would apply the adapter to --model, and the trainer applies it to "
            f"--mcore_model {mcore_model}; use --vllm_enable_lora false, which sends merged weights"
        )
    if sleep_level == 2:
        raise ValueError(
            "--sleep_level 2 discards vLLM's weights, and with --vllm_enable_lora true only the adapter is resent; "
            "use --sleep_level 1, or --vllm_enable_lora false"
        )
    if sync_check == "full":
        raise ValueError(
            "--sync_check full verifies the tensors of a model, and with --vllm_enable_lora true vLLM scales and fuses "
            "the adapter's tensors; use --sync_check canary, or --vllm_enable_lora false"
        )


def adapter_settings(folder: str) -> dict[str, Any]:
    """Return the flags with which a saved adapter was created; none if it has no adapter_config.json."""
    file = Path(folder).expanduser() / "adapter_config.json"
    saved = json.loads(file.read_text()) if file.is_file() else {}
    flags = {"lora_rank": "r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}
    return {flag: saved[key] for flag, key in flags.items() if key in saved}


def check_reference_adapter(folders: Sequence[str], trained: Mapping[str, Any], modules_to_save: Sequence[str]) -> None:
    """Check --ref_adapters: ms-swift creates its adapter with the settings of the trained one.

    `trained`: --lora_rank, --lora_alpha and --use_rslora.
    """
    if len(folders) != 1:
        raise ValueError(f"--ref_adapters {' '.join(folders)}: the reference has one adapter; use one folder")
    if modules_to_save:
        flags = f"--modules_to_save {' '.join(modules_to_save)}"
        raise ValueError(
            f"--ref_adapters with {flags}: a reference adapter has no whole modules; leave one of them out"
        )
    own = adapter_settings(folders[0])
    if not own:
        raise ValueError(
            f"--ref_adapters {folders[0]}: no adapter_config.json is there; use a folder with a saved adapter"
        )
    other = [flag for flag, value in own.items() if value != trained[flag]]
    if other:
        needed, given = (" ".join(f"--{f} {typed_value(values[f])}" for f in other) for values in (own, trained))
        raise ValueError(
            f"--ref_adapters {folders[0]}: its adapter has {needed}, and the trained one {given}; use {needed}"
        )


def check_vllm_installed() -> None:
    if find_spec("vllm") is None:
        raise ValueError(
            'vLLM, which generates the completions, is not installed; pip install "swift-megatron-grpo[gpu]"'
        )


def check_distributed_cpu_optimizer(in_fp32: bool, optimizer: str) -> None:
    """Check --optimizer_cpu_offload with --use_distributed_optimizer."""
    if in_fp32:
        raise ValueError(
            "--optimizer_cpu_offload true: Megatron's distributed optimizer cannot move states of fp32 weights to the "
            "CPU; use --torch_dtype bfloat16, or --use_distributed_optimizer false"
        )
    if optimizer != "adam":
        raise ValueError(
            f"--optimizer_cpu_offload true with --optimizer {optimizer} needs --use_distributed_optimizer false; set "
            "it, or use --optimizer adam"
        )


# ---- JSON

JSON_FLAGS = ("vllm_engine_kwargs", "megatron_extra_kwargs", "model_kwargs", "vllm_limit_mm_per_prompt", "columns")
