"""Rotary positions that differ from the checkpoint's (--rope_scaling, --max_model_len), for trainer and vLLM alike.

ms-swift changes the config from which the trainer's model is built. vLLM reads config.json, so it gets the same values
as overrides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.generation.protocol.model_identity import position_identity

_EXAMPLE = """--rope_scaling '{"rope_type": "yarn", "factor": 4}'"""
TYPES = ("default", "linear", "llama3", "yarn")  # that do not depend on the length of a sequence


def check_rope_scaling(value: str | Mapping[str, Any] | None, max_model_len: int | None) -> None:
    """Raise ValueError unless trainer and vLLM compute the same positions for this --rope_scaling."""
    if not value:
        return
    scaling = _parsed(value)
    kind = _type_of(scaling)
    if kind not in TYPES:
        raise ValueError(
            f"--rope_scaling {value}: {kind} depends on the length of a sequence, which trainer and vLLM measure "
            "differently, or is unknown; use --rope_scaling yarn or linear, with --max_model_len"
        )
    if "factor" not in scaling and max_model_len is None:
        raise ValueError(
            f"--rope_scaling {value} has no factor, so it needs the length to stretch to; use --max_model_len 32768, "
            f"or {_EXAMPLE}"
        )


def check_composite_rope(value: str | Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    """Raise ValueError if --rope_scaling changes the positions of a composite model. `config`: of its config.json.

    ms-swift fills in the checkpoint's own scaling where the flag is not given, which vLLM reads from config.json.
    """
    if not value:
        return
    asked, own = position_identity({"rope_parameters": _parsed(value)}), position_identity(config)
    if asked["rope_type"] != own["rope_type"] or asked["rope_factor"] not in (None, own["rope_factor"]):
        raise ValueError(
            f"--rope_scaling {value}: vLLM takes the positions of a model with an image or video part from its "
            "config.json only, so trainer and vLLM would differ; leave it out, or change rope_parameters in config.json"
        )


def config_overrides(
    config: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, max_model_len: int | None
) -> dict[str, Any]:
    """Return the values of config.json that these flags change, as ms-swift has resolved them."""
    overrides: dict[str, Any] = {}
    if rope_scaling:
        of_model = {**config, **(config.get("rope_parameters") or {})}
        kept = {key: of_model[key] for key in ("rope_theta", "partial_rotary_factor") if of_model.get(key) is not None}
        given = {key: value for key, value in rope_scaling.items() if key != "type" and value is not None}
        overrides["rope_parameters"] = {**kept, **given, "rope_type": _type_of(rope_scaling)}
    if max_model_len is not None:
        overrides["max_position_embeddings"] = max_model_len
    return overrides


def _parsed(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of --rope_scaling, which is JSON or only a type."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value) if value.lstrip().startswith("{") else {"rope_type": value}
    except json.JSONDecodeError as error:
        raise ValueError(f"--rope_scaling {value}: it is not JSON: {error}; use {_EXAMPLE}") from error
    values: Mapping[str, Any] = parsed
    return values


def _type_of(rope_scaling: Mapping[str, Any]) -> str:
    return str(rope_scaling.get("rope_type", rope_scaling.get("type", "default")))
