"""Scaled rotary positions reach vLLM as the trainer's model has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from swift_megatron_grpo.arguments.models import check_composite_rope
from swift_megatron_grpo.generation.protocol.model_identity import position_identity
from swift_megatron_grpo.settings.positions import Positions
from tests.unit.settings.flags import faults


def scaled(value: Any) -> Positions:
    return Positions(rope_scaling=value, max_model_len=None)


def refuse(value: Any, max_model_len: int | None) -> str:
    return faults(Positions, rope_scaling=value, max_model_len=max_model_len)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": None}


@pytest.mark.parametrize(
    "config", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_the_base_of_the_checkpoint_is_kept(config: dict[str, Any]) -> None:
    """transformers 4 writes it at the top of config.json, transformers 5 among the parameters that are replaced."""
    overrides = Positions(rope_scaling=YARN, max_model_len=8192).overrides(config)
    rope = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert overrides == {"rope_parameters": rope, "max_position_embeddings": 8192}
    assert Positions(rope_scaling=None, max_model_len=None).overrides(config) == {}
    assert position_identity(config | overrides) == {"rope_type": "yarn", "rope_factor": 4.0, "rope_theta": 5e5,
                                                     "rope_original_length": 2048}  # fmt: skip
    assert position_identity(config) == {"rope_type": "default", "rope_factor": None, "rope_theta": 5e5}


@pytest.mark.parametrize("value", ["dynamic", '{"type": "dynamic", "factor": 2}', '{"rope_type": "longrope"}'])
def test_types_that_depend_on_the_length_of_a_sequence_are_refused(value: str) -> None:
    assert "use --rope_scaling yarn or linear, with --max_model_len" in refuse(value, 8192)


def test_malformed_json_is_refused() -> None:
    for accepted in (None, "yarn", "linear", '{"rope_type": "yarn", "factor": 4}', YARN):
        assert refuse(accepted, 8192) == ""
    assert "it is not JSON: " in refuse('{"type": yarn}', 8192)


RELEASED: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3 scaled": {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": YARN | {"rope_theta": 1e6}},
    "qwen2_5_vl": {
        "num_hidden_layers": 2,
        "vision_config": {},
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "qwen3_vl": {
        "vision_config": {},
        "text_config": {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_server_of_the_same_checkpoint_has_the_same_positions(name: str, tmp_path: Path) -> None:
    """The trainer reads config.json, as released; the server sends what transformers has made of it."""
    config = {"model_type": name, **RELEASED[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert position_identity(AutoConfig.from_pretrained(tmp_path).to_dict()) == position_identity(config)


@pytest.mark.parametrize(
    "override",
    [{"rope_theta": 1e4}, {"factor": 2.0}, {"rope_type": "linear"}, {"original_max_position_embeddings": 4096}],
)
def test_a_server_that_was_started_with_another_scaling_is_refused(override: dict[str, Any]) -> None:
    trainer = Positions(rope_scaling=YARN, max_model_len=8192).overrides({"rope_theta": 5e5})
    server = {"rope_parameters": trainer["rope_parameters"] | override}
    assert position_identity(server) != position_identity(trainer)


@pytest.mark.parametrize("value", ["yarn", '{"type": "linear", "factor": 2}', YARN])
def test_other_positions_of_a_model_that_sees_are_refused(value: Any) -> None:
    config = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]}}}
    for own in (None, {}, config["text_config"]["rope_parameters"], {"type": "mrope", "mrope_section": [24, 20, 20]}):
        check_composite_rope(scaled(own), config)  # what ms-swift fills in
    check_composite_rope(scaled(YARN), {"text_config": {"rope_parameters": YARN}})
    with pytest.raises(ValueError, match="so trainer and vLLM would differ; leave it out, or change rope_parameters"):
        check_composite_rope(scaled(value), config)


def test_a_type_without_factor_needs_a_length() -> None:
    message = refuse("yarn", None)
    assert "--rope_scaling yarn has no factor" in message and "use --max_model_len 32768" in message
    assert refuse('{"rope_type": "yarn", "factor": 4}', None) == ""
