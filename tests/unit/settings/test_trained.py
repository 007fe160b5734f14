"""Flags that choose what is trained are refused if nothing would be trained, or if they would do nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from swift_megatron_grpo.settings.trained import Trained
from tests.unit.settings.flags import faults


def refuse(**typed: Any) -> str:
    return faults(Trained, **({"tuner_type": "full"} | typed))


@pytest.mark.parametrize("frozen", [{"freeze_parameters_ratio": 1.0}, {"freeze_parameters_regex": ".*"}])
def test_freezing_every_weight_is_refused_unless_some_are_activated(frozen: dict[str, Any]) -> None:
    [flag] = frozen
    assert re.match(rf"--{flag} \S+ freezes every weight", refuse(**frozen))
    assert refuse(**frozen, trainable_parameters=["output_layer"]) == ""
    assert refuse(**frozen, trainable_parameters_regex="norm") == ""


@pytest.mark.parametrize("flag", ["freeze_parameters_regex", "trainable_parameters_regex", "target_regex"])
def test_a_broken_pattern_is_refused_where_ms_swift_would_ignore_it(flag: str) -> None:
    assert re.match(rf"--{flag} layers\.\( is not a regular expression \(.*leave it out", refuse(**{flag: "layers.("}))
    assert refuse(**{flag: r"layers\.[0-3]\."}) == ""


def test_freezing_has_no_effect_on_an_adapter() -> None:
    typed: dict[str, Any] = {"tuner_type": "lora", "freeze_parameters_ratio": 0.5}
    assert "--freeze_parameters_ratio 0.5 has no effect with --tuner_type lora" in refuse(**typed)
    assert refuse(tuner_type="lora", target_regex=".*linear_qkv") == ""


def test_what_a_distributed_optimizer_cannot_do_is_refused() -> None:
    offloaded: dict[str, Any] = {"optimizer_cpu_offload": True, "use_distributed_optimizer": True}
    assert refuse(**offloaded) == ""
    in_fp32 = refuse(**offloaded, torch_dtype=torch.float32, fp16=False)
    assert "use --torch_dtype bfloat16, or --use_distributed_optimizer false" in in_fp32
    sgd: dict[str, Any] = {"optimizer": "sgd", "use_distributed_optimizer": True}
    assert refuse(**sgd).startswith("--optimizer sgd needs --use_distributed_optimizer false")
    assert refuse(**sgd | {"use_distributed_optimizer": False}) == ""


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("bf16", "bfloat16"), ("fp16", "bfloat16"), ("fp32", "float32 with --fp16 false"), ("auto", "bfloat16"),
    ],
)  # fmt: skip
def test_short_names_of_types_which_torch_lacks_lead_to_the_long_ones(typed: str, advice: str) -> None:
    assert refuse(torch_dtype=typed).endswith(f"use --torch_dtype {advice}")
    assert refuse(torch_dtype="bfloat16") == refuse(torch_dtype="torch.half") == ""


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("full", None, None), "use --recompute_method uniform --recompute_num_layers 1"),
        (("full", "block", None), "use --recompute_num_layers 1"),
        (("selective", "block", None), "--recompute_method block chooses whole layers"),
        (("selective", None, 1), "--recompute_num_layers 1 chooses whole layers"),
        (("full", "block", 1), ""),
        (("none", "block", 1), ""),
    ],
)
def test_recomputation_that_megatron_refuses_late(typed: tuple[Any, ...], message: str) -> None:
    flags = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    found = refuse(**dict(zip(flags, typed, strict=True)))
    assert message in found and bool(found) == bool(message)
