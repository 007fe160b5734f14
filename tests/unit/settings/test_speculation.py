"""Drafts are refused where they would not be exact or have no test, by flag and with a value that works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swift_megatron_grpo.settings.layout import DataShape, ModelShape
from swift_megatron_grpo.settings.speculation import Speculation
from tests.unit.settings.flags import faults

ON = {
    "speculative_rollouts": "history",
    "seed_completions": True,
    "vllm_mode": "colocate",
    "rollout_quantization": "none",
}


def shape(**changes: Any) -> ModelShape:
    return ModelShape("m", 8, 2, 64, 4, **{"experts": None, "expert_ffn": None, **changes})


def test_a_dense_text_model_with_seeds_is_served() -> None:
    assert faults(Speculation, shape=shape(), rows=DataShape(0, model_sees=False), **ON) == ""
    assert faults(Speculation, shape=shape(experts=8), rows=DataShape(1), speculative_rollouts="off") == ""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"seed_completions": False}, "add --seed_completions true"),
        ({"vllm_mode": "server"}, "rollout servers .* use --vllm_mode colocate, or --speculative_rollouts off"),
        ({"rollout_quantization": "fp8"}, "use --rollout_quantization none"),
        ({"structured_outputs_regex": "a*"}, "--structured_outputs_regex .* use --speculative_rollouts off"),
        ({"min_p": 0.1}, "--min_p 0.1 .* use --min_p 0"),
        ({"rollout_replay": "dump"}, "--rollout_replay does not generate; leave one of them out"),
        ({"speculative_rollouts": "lossy"}, "--speculative_rollouts lossy: unknown value; use "),
        ({"speculative_tokens": 0}, "must be at least 1 and at most 16; use --speculative_tokens 4"),
        ({"speculative_rollouts": "off", "speculative_tokens": 2}, "add that flag, or leave this one out"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(flags: dict[str, Any], problem: str) -> None:
    assert re.search(problem, faults(Speculation, **{**ON, **flags}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": 8}, "--model m is a mixture of experts"),
        ({"linear_heads": (4, 8)}, "--model m is a model with linear attention"),
        ({"unread_window": 4096}, "--model m is a model with a sliding window"),
    ],
)
def test_other_models_than_dense_ones_are_refused(changes: dict[str, Any], problem: str) -> None:
    message = faults(Speculation, shape=shape(**changes), **ON)
    assert problem in message and message.endswith("use --speculative_rollouts off")


def test_a_model_with_an_image_part_is_refused_also_for_rows_of_text() -> None:
    assert "image part" in faults(Speculation, rows=DataShape(0, model_sees=True), **ON)
