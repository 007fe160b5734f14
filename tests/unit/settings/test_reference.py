"""A reference that moves: a copy of its own, in the layout of training."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.settings.reference import Reference
from tests.unit.settings.flags import faults, of

MOVES = {"sync_ref_model": True, "model": "small", "beta": 0.1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no reference": ({"beta": 0.0}, "moves the frozen copy of the reference, and --beta is 0"),
    "lora": ({"tuner_type": "lora"}, "that of a LoRA run is the model without its adapter; leave it out"),
    "layout": ({"ref_tensor_model_parallel_size": 1}, "with --ref_tensor_model_parallel_size 1: policy and reference"),
    "never": ({"ref_model_sync_steps": 0}, "--ref_model_sync_steps 0 must be at least 1; use --ref_model_sync_steps 5"),
    "no share": ({"ref_model_mixup_alpha": 0.0}, "--ref_model_mixup_alpha 0 must be above 0 and at most 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_move_is_refused(case: str) -> None:
    typed, message = REFUSED[case]
    assert message in faults(Reference, **MOVES | typed)
    assert faults(Reference, **MOVES) == ""


def test_a_moving_reference_is_not_the_teacher() -> None:
    taught = {"model": "small", "ref_model": "big", "teacher_model": "big", "beta": 0.1}
    assert of(Reference, **taught).is_teacher and not of(Reference, **taught, sync_ref_model=True).is_teacher
