"""A step with a loss that is not finite updates nothing; a weight that is not finite after an update is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.dist.conftest import Ranks


def faults(ranks: Ranks, rank: int) -> dict[str, Any]:
    flags = ranks.flags("dense", "full", "bfloat16", ["--tensor_model_parallel_size", "2"])
    ranks.call("faults", "engine_faults:main", 2, flags)
    return ranks.report("faults", rank)


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_step_updates_nothing_and_is_named_in_the_error(ranks: Ranks, rank: int) -> None:
    report = faults(ranks, rank)
    assert report["nan"].startswith("step 1") and "nothing was updated" in report["nan"]
    assert report["unchanged"]
    assert math.isfinite(report["after"]) and report["changed"]  # the engine still works


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_that_an_update_breaks_is_named_at_once_on_every_rank(ranks: Ranks, rank: int) -> None:
    """Rank 1 has the weight; rank 0 raises with it, before a checkpoint or a weight sync."""
    message = faults(ranks, rank)["weights"]
    assert message.startswith(
        "step 2: the update made 1 weights NaN or infinite: decoder.final_layernorm.weight. They were neither saved"
    )
