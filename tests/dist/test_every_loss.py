"""Every loss, its metrics, the entropy threshold and the KL of completions match one rank on other layouts."""

from __future__ import annotations

import pytest

from tests.dist.conftest import LOSS_LAYOUTS, Ranks
from tests.support.choice import rest_nightly

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("layout", rest_nightly(LOSS_LAYOUTS, ["tp2+sp", "pp2", "cp2", "dp2", "mbs8+shared"]))
def test_a_layout_matches_one_rank(ranks: Ranks, layout: str) -> None:
    one, other = (ranks.losses(name) for name in ("one", layout))
    assert len(one) == 20 and set(one) == set(other)
    for name, numbers in one.items():
        assert other[name] == pytest.approx(numbers, rel=1e-4, abs=1e-6), name
        if "loss" in numbers:
            assert other[name]["loss"] == pytest.approx(numbers["loss"], abs=1e-6), name
            assert other[name]["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-5), name


def test_the_compared_numbers_are_not_trivial(ranks: Ranks) -> None:
    one = ranks.losses("one")
    assert len({round(numbers["loss"], 7) for numbers in one.values() if "loss" in numbers}) >= 10
    assert all(numbers["grad_norm"] > 1e-3 for numbers in one.values() if "loss" in numbers)
    assert one["grpo"]["clip_ratio/region_mean"] > 0.01 and one["grpo"]["rollout_correction/clipped_frac"] > 0.01
    assert one["sequence_mask"]["off_policy_sequence_mask/masked_frac"] > 0
    assert 0.35 < one["once"]["share"] < 0.45
    assert one["answers"]["actor/pg_loss"] == pytest.approx(one["dapo"]["actor/pg_loss"], abs=1e-7)
    assert one["answers"]["chord/sft_loss"] == pytest.approx(one["nll of answers"]["mean"], abs=1e-5)
    mixed = 0.7 * one["dapo"]["loss"] + 0.3 * one["answers"]["chord/sft_loss"]
    assert one["answers"]["loss"] == pytest.approx(mixed, abs=1e-6)
    assert one["selected"]["actor/pg_loss"] != one["dapo"]["actor/pg_loss"]
