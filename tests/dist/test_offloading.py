"""Steps are the same to the bit whether or not the trained state leaves the GPU in between, and it really leaves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.conftest import OFFLOADED, Ranks

HERE = {
    "room made": {"policy"},  # until the weights have been sent
    "generation": set(),
    "inference": {"policy"},
    "reference": {"policy", "reference"},
    "training": {"policy", "gradients", "optimizer"},
}


def offloaded(ranks: Ranks, what: str, rank: int) -> dict[str, Any]:
    kind, tuner, extra = OFFLOADED[what]
    adapter = ["--adapters", ranks.adapter(kind)] if tuner == "lora" else []
    ranks.call(f"offload-{what}", "offloading:main", 2, ranks.flags(kind, tuner, "bfloat16", [*extra, *adapter]))
    return ranks.report(f"offload-{what}", rank)


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", list(OFFLOADED))
def test_steps_are_the_same_to_the_bit(ranks: Ranks, what: str, rank: int) -> None:
    told = offloaded(ranks, what, rank)
    assert told["metrics_equal"] == [True, True, True]
    assert told["weights_differ"] == []
    assert told["trained"] and told["moved_by_training"] > 0


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", list(OFFLOADED))
def test_what_a_phase_does_not_read_holds_no_memory(ranks: Ranks, what: str, rank: int) -> None:
    told = offloaded(ranks, what, rank)
    kinds = {"policy", "gradients", "optimizer"} | ({"reference"} if told["groups"]["reference policy"] else set())
    assert ("reference" in kinds) == ("lora" not in what)  # with LoRA the reference is the base under the adapter
    for step in told["left"]:
        for phase, here in HERE.items():
            assert {kind for kind in kinds if step[phase][kind]} == here & kinds, phase
    for step in told["stayed"][1:]:  # Adam makes its states in the first one
        for phase in list(HERE)[1:]:
            assert all(step[phase][kind] for kind in kinds)


@pytest.mark.dist
def test_a_decision_is_told_once(ranks: Ranks) -> None:
    told = offloaded(ranks, "full", 0)
    wake, training = told["decisions"]
    assert wake.endswith("the trainer offloads gradients and optimizer state and reference policy and weights")
    assert training.startswith("the reference policy is offloaded in training")
