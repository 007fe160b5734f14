"""Scaled rotary positions reach vLLM as the trainer's model has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.arguments.rope import check_rope_scaling, config_overrides
from swift_megatron_grpo.protocol.model_identity import position_identity

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": None}


@pytest.mark.parametrize(
    "config", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_the_base_of_the_checkpoint_is_kept(config: dict[str, Any], tmp_path: Path) -> None:
    """transformers 4 writes it at the top of config.json, transformers 5 among the parameters that are replaced."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = config_overrides(tmp_path, YARN, 8192)
    rope = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert overrides == {"rope_parameters": rope, "max_position_embeddings": 8192}
    assert config_overrides(tmp_path, None, None) == {}
    assert position_identity(config | overrides) == {"rope_type": "yarn", "rope_factor": 4.0}
    assert position_identity(config) == {"rope_type": "default", "rope_factor": None}


@pytest.mark.parametrize("value", ["dynamic", '{"type": "dynamic", "factor": 2}', '{"rope_type": "longrope"}'])
def test_types_that_depend_on_the_length_of_a_sequence_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="use --rope_scaling yarn or linear, with --max_model_len"):
        check_rope_scaling(value)


def test_malformed_json_is_refused() -> None:
    for accepted in (None, "yarn", "linear", '{"rope_type": "yarn", "factor": 4}', YARN):
        check_rope_scaling(accepted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is not JSON: "):
        check_rope_scaling('{"type": yarn}')
