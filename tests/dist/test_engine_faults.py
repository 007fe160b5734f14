"""A step with a loss that is not finite updates nothing, and says which step."""

from __future__ import annotations

import math

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_step_changes_nothing_and_is_named(ranks: Ranks, rank: int) -> None:
    flags = ranks.flags("dense", "full", "bfloat16", ["--tensor_model_parallel_size", "2"])
    ranks.call("faults", "engine_faults:main", 2, flags)
    told = ranks.report("faults", rank)
    assert told["nan"].startswith("step 1") and "nothing was updated" in told["nan"]
    assert told["unchanged"]
    assert math.isfinite(told["after"]) and told["changed"]  # and the engine goes on
