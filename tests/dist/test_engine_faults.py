"""A step with a loss that is not finite updates nothing, and says which step."""

from __future__ import annotations

import json
import math

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_step_changes_nothing_and_is_named(ranks: Ranks, rank: int) -> None:
    told = json.loads(ranks.told("faults", rank).read_text())
    assert told["nan"].startswith("step 1") and "nothing was updated" in told["nan"]
    assert told["unchanged"]
    assert math.isfinite(told["after"]) and told["changed"]  # and the engine goes on
