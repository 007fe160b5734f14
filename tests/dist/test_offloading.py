"""Steps with and without offloading are bitwise equal, and offloaded state really leaves the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.conftest import OFFLOADED, Ranks
from tests.support.choice import rest_nightly

RESIDENT = {
    "room made": {"policy"},  # until the weights are sent
    "generation": set(),
    "inference": {"policy"},
    "reference": {"policy", "reference"},
    "training": {"policy", "gradients", "optimizer"},
}
CASE = pytest.mark.parametrize("case", rest_nightly(list(OFFLOADED), ["full", "lora"]))


def offloaded(ranks: Ranks, case: str, rank: int) -> dict[str, Any]:
    kind, tuner, extra = OFFLOADED[case]
    adapter = ["--adapters", ranks.adapter(kind)] if tuner == "lora" else []
    ranks.call(f"offload-{case}", "offloading:main", 2, ranks.flags(kind, tuner, "bfloat16", [*extra, *adapter]))
    return ranks.report(f"offload-{case}", rank)


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@CASE
def test_steps_with_and_without_offloading_are_bitwise_equal(ranks: Ranks, case: str, rank: int) -> None:
    report = offloaded(ranks, case, rank)
    assert report["metrics_equal"] == [True] * 5  # of them two in which more is offloaded after the sync
    assert report["weights_differ"] == []
    assert report["trained"] and report["moved_by_training"] > 0


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@CASE
def test_state_that_a_phase_does_not_read_uses_no_memory(ranks: Ranks, case: str, rank: int) -> None:
    report = offloaded(ranks, case, rank)
    kinds = {"policy", "gradients", "optimizer"} | ({"reference"} if report["groups"]["reference policy"] else set())
    assert ("reference" in kinds) == ("lora" not in case)  # with LoRA the reference is the base under the adapter
    for step in report["resident_with_offloading"]:
        for phase, resident in RESIDENT.items():
            assert {kind for kind in kinds if step[phase][kind]} == resident & kinds, phase
    for step in report["resident_without"][1:]:  # Adam creates its states in the first step
        for phase in list(RESIDENT)[1:]:
            assert all(step[phase][kind] for kind in kinds)


@pytest.mark.dist
def test_an_offloading_decision_is_logged_once(ranks: Ranks) -> None:
    report = offloaded(ranks, "full", 0)
    wake, training = report["decisions"]
    assert wake.startswith("Before the weight sync: vLLM needs")
    assert wake.endswith("the trainer offloads gradients and optimizer state and reference policy and weights")
    assert training.startswith("the reference policy is offloaded in training")


@pytest.mark.dist
@CASE
def test_more_is_offloaded_if_the_weight_sync_took_what_was_free(ranks: Ranks, case: str) -> None:
    report = offloaded(ranks, case, 0)
    reference = ["reference policy"] if report["groups"]["reference policy"] else []
    for before, after in report["short_after_the_sync"]:
        assert before == reference  # no phase since training has read it
        assert sorted(after) == ["gradients", *reference]
    before_the_sync, after_it = report["decisions_of_short_memory"]  # of the first of the two steps
    assert before_the_sync.startswith("Before the weight sync: vLLM needs")
    assert before_the_sync.endswith(f"the trainer offloads {' and '.join(reference) or 'nothing'}")
    assert after_it.startswith("After the weight sync: vLLM needs")
    assert after_it.endswith(f"the trainer offloads {' and '.join(['gradients', *reference])}")
