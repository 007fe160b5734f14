"""Experts that no router of the model can have chosen stop the run by name; choices are compared as sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swift_megatron_grpo.loop.checks.experts import (
    WrongExperts,
    check_experts,
    check_reported,
    equal_choices,
    problem_of_rows,
)
from swift_megatron_grpo.packing.routing import ExpertLayers, layers_with_experts
from swift_megatron_grpo.types import ExpertRows, Prompt, Rollout

LAYERS = ExpertLayers(num_layers=3, with_experts=(1, 2), experts=8, k=2)
ROLLOUT = Rollout(Prompt("0-7", {}), [1, 2], [3, 4], None, "", "stop", 0)


def rows() -> ExpertRows:
    """Return those of 3 tokens; the first layer has no experts."""
    return np.array([[[0, 0], [0, 1], [7, 2]], [[0, 0], [3, 4], [5, 6]], [[0, 0], [1, 0], [2, 7]]], np.uint8)


def test_what_a_router_can_choose_is_accepted() -> None:
    assert problem_of_rows(rows(), LAYERS) is None
    check_experts([ROLLOUT, replace(ROLLOUT, routed_experts=rows())], LAYERS)


def test_a_row_of_zeros_names_the_layer() -> None:
    zero = rows()
    zero[1, 2] = 0
    with pytest.raises(WrongExperts, match=r"prompt 0-7: vLLM does not report the experts of layer 2: a row of it is"):
        check_experts([replace(ROLLOUT, routed_experts=zero)], LAYERS)


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [((0, 1), (3, 3), "reports an expert twice"), ((2, 1), (8, 0), "reports the expert 8, and the model has 8")],
)
def test_experts_that_no_router_has_are_named(place: tuple[int, int], value: tuple[int, int], problem: str) -> None:
    wrong = rows()
    wrong[place] = value
    assert problem in str(problem_of_rows(wrong, LAYERS))


def test_rows_of_another_model_are_named() -> None:
    assert "experts of 2 layers and 2 per token, not 3 and 2" in str(problem_of_rows(rows()[:, 1:], LAYERS))


def test_with_one_expert_per_token_zero_is_a_choice() -> None:
    one = ExpertLayers(num_layers=1, with_experts=(0,), experts=4, k=1)
    assert problem_of_rows(np.zeros((5, 1, 1), np.uint8), one) is None


@pytest.mark.parametrize(("from_disk", "problem"), [(False, "no completion came with them"), (True, "dump .* none")])
def test_a_rollout_without_any_experts_stops_a_run_that_replays_them(from_disk: bool, problem: str) -> None:
    with pytest.raises(WrongExperts, match=problem):
        check_reported([ROLLOUT, ROLLOUT], from_disk)
    check_reported([ROLLOUT, replace(ROLLOUT, routed_experts=rows())], from_disk)


def test_choices_of_sampled_tokens_and_own_layers_compare_in_any_order() -> None:
    engine = rows()
    trainer = np.concatenate([engine[..., ::-1].astype(np.int16), np.full((1, 3, 2), 1, np.int16)])  # [t, layers, k]
    trainer[:, 0] = -1  # a layer of another pipeline stage
    trainer[2, 1] = (1, 5)
    equal = equal_choices(trainer, engine, [False, True, True, True])
    assert equal.tolist() == [[True, True], [False, True]]


def test_layers_with_experts_are_every_nth_or_those_of_a_mask() -> None:
    assert layers_with_experts(4, 1) == (0, 1, 2, 3) and layers_with_experts(5, 2) == (0, 2, 4)
    assert layers_with_experts(4, [0, 1, 1, 0]) == (1, 2)
