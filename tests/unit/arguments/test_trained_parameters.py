"""Flags that choose what is trained are refused if nothing would be trained, or if they would do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.arguments.trained_parameters import check_target_modules, check_trained

UNSET: dict[str, Any] = {
    "tuner_type": "full", "freeze_parameters_ratio": 0.0, "freeze_parameters_regex": None, "trainable_parameters": [],
    "trainable_parameters_regex": None, "target_regex": None,
}  # fmt: skip


@pytest.mark.parametrize("frozen", [{"freeze_parameters_ratio": 1.0}, {"freeze_parameters_regex": ".*"}])
def test_freezing_every_weight_is_refused_unless_some_are_activated(frozen: dict[str, Any]) -> None:
    [flag] = frozen
    with pytest.raises(ValueError, match=rf"--{flag} \S+ freezes every weight"):
        check_trained(UNSET | frozen)
    check_trained(UNSET | frozen | {"trainable_parameters": ["output_layer"]})
    check_trained(UNSET | frozen | {"trainable_parameters_regex": "norm"})


@pytest.mark.parametrize("flag", ["freeze_parameters_regex", "trainable_parameters_regex", "target_regex"])
def test_a_broken_pattern_is_refused_where_ms_swift_would_ignore_it(flag: str) -> None:
    with pytest.raises(ValueError, match=rf"--{flag} layers\.\( is no regular expression \(.*leave it out"):
        check_trained(UNSET | {flag: "layers.("})
    check_trained(UNSET | {flag: r"layers\.[0-3]\."})


def test_freezing_has_no_effect_on_an_adapter() -> None:
    with pytest.raises(ValueError, match=r"--freeze_parameters_ratio 0\.5 has no effect with --tuner_type lora"):
        check_trained(UNSET | {"tuner_type": "lora", "freeze_parameters_ratio": 0.5})
    check_trained(UNSET | {"tuner_type": "lora", "target_regex": ".*linear_qkv"})


def test_names_of_transformers_lead_to_those_of_megatron() -> None:
    with pytest.raises(ValueError, match=r"--target_modules q_proj k_proj: .* --target_modules linear_qkv linear_fc1"):
        check_target_modules(["q_proj", "k_proj", "linear_fc1"])
    check_target_modules(["all-linear"])
    check_target_modules(r".*\.q_proj")  # of --target_regex
