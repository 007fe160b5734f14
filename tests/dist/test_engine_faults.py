"""A step with a loss that is not finite updates nothing, and the error names the step."""

from __future__ import annotations

import math

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_step_updates_nothing_and_is_named_in_the_error(ranks: Ranks, rank: int) -> None:
    flags = ranks.flags("dense", "full", "bfloat16", ["--tensor_model_parallel_size", "2"])
    ranks.call("faults", "engine_faults:main", 2, flags)
    report = ranks.report("faults", rank)
    assert report["nan"].startswith("step 1") and "nothing was updated" in report["nan"]
    assert report["unchanged"]
    assert math.isfinite(report["after"]) and report["changed"]  # the engine still works
