"""A rank that runs out of memory makes all ranks run the step again in smaller micro batches, with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.dist.conftest import Ranks
from tests.dist.test_router_bias import SIGMOID, with_expert_bias

pytestmark = pytest.mark.dist
LARGE, SMALL = 400, 100  # tokens of a micro batch; the second one after halving twice


def run(
    ranks: Ranks,
    name: str,
    budget: int,
    fits: int,
    in_backward: bool = False,
    more: Sequence[str] = (),
    own: bool = False,
    kind: str = "dense",
) -> list[dict[str, Any]]:
    flags = ranks.flags(kind, "full", "float32", ["--max_tokens_per_micro_batch", str(budget), *more])
    ranks.call(name, "memory_faults:main", 2, flags, fits=fits, in_backward=in_backward, own=own)
    return [ranks.report(name, rank) for rank in range(2)]


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_that_does_not_fit_is_run_again_with_half_the_budget(ranks: Ranks, in_backward: bool) -> None:
    expected = run(ranks, "fits", SMALL, fits=LARGE)
    found = run(ranks, f"too-large-{in_backward}", LARGE, fits=SMALL, in_backward=in_backward)
    for rank in range(2):
        assert found[rank]["steps"] == expected[rank]["steps"] and found[rank]["weights"] == expected[rank]["weights"]
        assert found[rank]["values"] == expected[rank]["values"]
        assert found[rank]["budgets"] == [SMALL, None] and expected[rank]["budgets"] == [SMALL, None]
    lowered = [message for message in found[0]["messages"] if "ran out of GPU memory" in message]
    assert len(lowered) == 2 and "--max_tokens_per_micro_batch 400; it is run again with 200" in lowered[0]
    assert not any("ran out" in message for message in found[1]["messages"] + expected[0]["messages"])


def test_a_log_prob_pass_that_does_not_fit_is_run_again_on_its_rank(ranks: Ranks) -> None:
    expected = run(ranks, "fits", SMALL, fits=LARGE)
    flags = ["--infer_max_tokens_per_micro_batch", str(LARGE)]
    found = run(ranks, "inference-too-large", SMALL, fits=SMALL, more=flags)
    for rank, budget in enumerate([LARGE, SMALL]):
        assert found[rank]["budgets"] == [SMALL, budget] and found[rank]["steps"] == expected[rank]["steps"]
        for index, values in expected[rank]["values"].items():
            assert found[rank]["values"][index] == pytest.approx(values, abs=1e-6)


def test_a_sample_that_does_not_fit_ends_the_run_on_all_ranks(ranks: Ranks) -> None:
    first, second = run(ranks, "never-fits", LARGE, fits=1)
    assert first["error"] == "another data-parallel rank ran out of GPU memory in this step"
    assert "cannot be lower: the longest completion has" in second["error"]


def test_a_rank_has_the_log_probs_of_its_samples_with_half_the_budget(ranks: Ranks) -> None:
    more = ["--share_prompts", "true"]
    expected = run(ranks, "own-fits", LARGE, fits=10**6, more=more, own=True)
    found = run(ranks, "own-too-large", LARGE, fits=120, more=more, own=True)
    assert found[0]["budgets"][0] < LARGE
    for ours, theirs in zip(found[0]["steps"], expected[0]["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_repeated_step_counts_the_tokens_of_experts_once(ranks: Ranks) -> None:
    """The counts move the routers' bias. Those of the attempt that did not fit must not be in them."""
    moving = json.dumps(SIGMOID | {"moe_router_bias_update_rate": 1e-3})
    more = ["--model", str(with_expert_bias(ranks)), "--megatron_extra_kwargs", moving]
    expected = run(ranks, "experts-fit", SMALL, fits=LARGE, more=more, kind="moe")
    found = run(ranks, "experts-too-large", LARGE, fits=SMALL, more=more, kind="moe")
    for rank in range(2):
        assert found[rank]["tokens_of_experts"] == expected[rank]["tokens_of_experts"]
        assert len(expected[rank]["tokens_of_experts"]) == 2
        assert found[rank]["weights"] == pytest.approx(expected[rank]["weights"], rel=1e-9)
