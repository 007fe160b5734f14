"""Flags that choose what is trained: they must leave something to train, and do what they name.

ms-swift logs a warning for a regular expression that it cannot read, and goes on as if there were none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.arguments.advice import typed_value

_PATTERNS = ("freeze_parameters_regex", "trainable_parameters_regex", "target_regex")
_ONLY_FULL = (
    "freeze_parameters_ratio",
    "freeze_parameters_regex",
    "trainable_parameters",
    "trainable_parameters_regex",
)
_IN_MEGATRON: Mapping[str, str] = {  # names of transformers: those of Megatron
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "qkv_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "gate_up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "embed_tokens": "all-embedding",
    "lm_head": "output_layer",
}


def check_trained(values: Mapping[str, Any]) -> None:
    """Refuse flags with which no weight could change, and those without effect. `values`: by flag, as typed."""
    for flag in _PATTERNS:
        _check_pattern(flag, values[flag])
    if values["tuner_type"] != "full":
        _check_adapter(values)
        return
    frozen_by = [("freeze_parameters_ratio", 1)] if values["freeze_parameters_ratio"] == 1 else []
    pattern = values["freeze_parameters_regex"]
    if pattern and re.search(pattern, ""):  # what is found in an empty name is found in every one
        frozen_by.append(("freeze_parameters_regex", pattern))
    if frozen_by and not values["trainable_parameters"] and not values["trainable_parameters_regex"]:
        flag, value = frozen_by[0]
        raise ValueError(
            f"--{flag} {value} freezes every weight, so nothing would be trained; leave it out, or use "
            "--trainable_parameters with the names of some weights"
        )


def _check_pattern(flag: str, pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(
            f"--{flag} {pattern} is no regular expression ({error}); use one that Python's re.search accepts, for "
            rf"example --{flag} 'layers\.[0-3]\.', or leave it out"
        ) from error


def _check_adapter(values: Mapping[str, Any]) -> None:
    given = [flag for flag in _ONLY_FULL if values[flag]]
    if given:
        raise ValueError(
            f"--{given[0]} {typed_value(values[given[0]])} has no effect with --tuner_type {values['tuner_type']}, "
            "which trains all of an adapter; leave it out, or choose the layers that have one: use --target_modules "
            "linear_qkv linear_proj"
        )


def check_target_modules(typed: object) -> None:
    """Refuse names of transformers in --target_modules of a language model, whose layers have Megatron's names."""
    modules = typed if isinstance(typed, list) else []
    wrong = [module for module in modules if module in _IN_MEGATRON]
    if wrong:
        right = dict.fromkeys(_IN_MEGATRON.get(module, module) for module in modules)
        raise ValueError(
            f"--target_modules {' '.join(wrong)}: these are names of transformers, and no layer of Megatron has them; "
            f"use --target_modules {' '.join(right)}"
        )
