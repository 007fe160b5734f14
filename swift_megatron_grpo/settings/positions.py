"""Rotary positions that differ from the checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.settings.flag import Faults, Flags, rule_as_typed

_EXAMPLE = """--rope_scaling '{"rope_type": "yarn", "factor": 4}'"""
TYPES = ("default", "linear", "llama3", "yarn")  # that do not depend on the length of a sequence


class Positions(Flags):
    """Scaling of positions: ms-swift changes the trainer's config, and vLLM gets the same values as overrides."""

    rope_scaling: Any  # JSON or only a type; a mapping once ms-swift has resolved it
    max_model_len: int | None

    @rule_as_typed  # ms-swift fills in the scaling of config.json
    def trainer_and_vllm_compute_the_same_positions(self) -> Faults:
        value, scaling = self.rope_scaling, self.scaling
        if not value:
            return
        kind = _type_of(scaling)
        if kind not in TYPES:
            yield (
                f"--rope_scaling {value}: {kind} depends on the length of a sequence, which trainer and vLLM measure "
                "differently, or is unknown; use --rope_scaling yarn or linear, with --max_model_len"
            )
        elif "factor" not in scaling and self.max_model_len is None:
            yield (
                f"--rope_scaling {value} has no factor, so it needs the length to stretch to; use --max_model_len "
                f"32768, or {_EXAMPLE}"
            )

    @property
    def scaling(self) -> Mapping[str, Any]:
        """The values of --rope_scaling; empty if it is not set."""
        value = self.rope_scaling or {}
        if not isinstance(value, str):
            return dict(value)
        try:
            parsed = json.loads(value) if value.lstrip().startswith("{") else {"rope_type": value}
        except json.JSONDecodeError as error:
            raise ValueError(f"--rope_scaling {value}: it is not JSON: {error}; use {_EXAMPLE}") from error
        return dict(parsed)

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of config.json that these flags change."""
        overrides: dict[str, Any] = {}
        if self.rope_scaling:
            of_model = {**config, **(config.get("rope_parameters") or {})}
            kept = {
                key: of_model[key] for key in ("rope_theta", "partial_rotary_factor") if of_model.get(key) is not None
            }
            given = {key: value for key, value in self.scaling.items() if key != "type" and value is not None}
            overrides["rope_parameters"] = {**kept, **given, "rope_type": _type_of(self.scaling)}
        if self.max_model_len is not None:
            overrides["max_position_embeddings"] = self.max_model_len
        return overrides


def _type_of(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", scaling.get("type", "default")))
