"""The head in a real model: both of its paths, and a weight tied to the embedding."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.check_layouts.command import compare
from tests.dist.conftest import TIED_LAYOUTS, Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("layout", TIED_LAYOUTS)
def test_a_tied_weight_gets_the_same_gradients_as_on_one_rank(ranks: Ranks, layout: str) -> None:
    difference = compare(layout, ranks.layouts("tied", "full", layout))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6


# Full tuning: the head writes the weight's gradient into Megatron's buffer itself. LoRA: the weight is frozen.
@pytest.mark.parametrize(("kind", "tuner"), [("tied", "full"), ("dense", "lora")])
def test_the_generic_and_the_fused_path_agree(ranks: Ranks, kind: str, tuner: str) -> None:
    difference = compare("mbs2", ranks.generic_head(kind, tuner))
    assert difference.loss <= 1e-6 and difference.grad_norm <= 1e-6 and difference.weights <= 1e-6
