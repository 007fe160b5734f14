"""The head in a real model: both of its paths, and a weight that the embedding has as well."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.tools.check_layouts import compare
from tests.dist.conftest import TIED_LAYOUTS, Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("layout", TIED_LAYOUTS)
def test_a_tied_weight_gets_the_gradients_of_one_rank(ranks: Ranks, layout: str) -> None:
    found = compare(layout, ranks.layouts("tied", "full", layout))
    assert found.loss <= 1e-6 and found.grad_norm <= 1e-6 and found.weights <= 1e-6


# Full tuning: the weight's gradient goes into Megatron's buffer by hand. LoRA: the weight is frozen.
@pytest.mark.parametrize(("kind", "tuner"), [("tied", "full"), ("dense", "lora")])
def test_the_path_for_any_model_and_the_fused_one_agree(ranks: Ranks, kind: str, tuner: str) -> None:
    found = compare("mbs2", ranks.generic_head(kind, tuner))
    assert found.loss <= 1e-6 and found.grad_norm <= 1e-6 and found.weights <= 1e-6
