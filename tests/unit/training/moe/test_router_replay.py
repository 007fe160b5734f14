"""A router takes the experts that are given to it, in forward and when backward repeats a checkpointed layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch.utils.checkpoint import checkpoint

from swift_megatron_grpo.training.moe.router_replay import ExpertChoice, RoutingUnsupported

SCORES = torch.tensor([[1.0, 4.0, 3.0, 2.0], [4.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])


def test_rows_of_minus_one_are_the_routers_own() -> None:
    given = torch.tensor([[3, 0], [-1, -1], [0, 3]])
    choice = ExpertChoice(0, trains=False, records=False)
    with choice.forward(given):
        values, indices = choice.get_replay_topk(SCORES, 2, default_compute_topk=lambda x, k, **_: tuple(x.topk(k)))
    assert indices.tolist() == [[3, 0], [0, 3], [0, 3]]
    assert values.tolist() == [[2.0, 1.0], [4.0, 3.0], [0.0, 3.0]]


def route(logits: torch.Tensor, choice: ExpertChoice | None, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    probs, routing_map = topk_routing_with_score_function(logits, 2, router_replay=choice, **settings)
    return probs, routing_map


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_pre_softmax": True},
        {"score_function": "sigmoid"},
        {"score_function": "sigmoid", "expert_bias": torch.tensor([0.5, -0.5, 0.0, 2.0])},
        {"num_groups": 2, "group_topk": 1},
    ],
)
def test_megatron_weighs_the_given_experts_and_lets_gradients_through(settings: dict[str, Any]) -> None:
    recorder = ExpertChoice(0, trains=False, records=True)
    with recorder.forward(None):
        own_probs, own_map = route(SCORES, recorder, **settings)
    [recorded] = recorder.chosen
    logits = SCORES.clone().requires_grad_()
    choice = ExpertChoice(0, trains=True, records=False)
    with choice.forward(recorded):
        probs, routing_map = route(logits, choice, **settings)
    assert torch.equal(probs, own_probs) and torch.equal(routing_map, own_map)
    with choice.forward(torch.tensor([[0, 3], [1, 2], [0, 1]])):
        probs, routing_map = route(logits, choice, **settings)
    assert routing_map.int().tolist() == [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]]
    probs.square().sum().backward()
    assert logits.grad is not None and (logits.grad.abs().sum(-1) > 0).all()


def test_a_checkpointed_layer_gets_the_same_experts_in_backward() -> None:
    """Two micro batches are in flight, as in a pipeline."""
    choice, given = ExpertChoice(0, trains=True, records=True), [torch.tensor([[0, 1]] * 3), torch.tensor([[3, 2]] * 3)]
    outputs = []
    for rows in given:
        logits = SCORES.clone().requires_grad_()
        with choice.forward(rows):
            outputs.append(checkpoint(lambda x: route(x, choice)[0].square().sum(), logits, use_reentrant=True))
    for output in outputs:
        output.backward()
    assert [chosen.tolist() for chosen in choice.chosen] == [rows.tolist() for rows in (*given, *given)]


def test_a_router_that_runs_again_without_a_checkpoint_stops_the_run() -> None:
    choice = ExpertChoice(4, trains=True, records=False)
    with choice.forward(None):
        route(SCORES, choice)
    with pytest.raises(RoutingUnsupported, match="layer 4 ran again"):
        route(SCORES, choice)


def test_a_router_that_does_not_ask_stops_the_run_by_name() -> None:
    choice = ExpertChoice(4, trains=False, records=False)
    with pytest.raises(RoutingUnsupported, match=r"layer 4 .* --moe_router_fusion false"), choice.forward(None):
        pass


def test_a_routing_of_another_shape_is_refused() -> None:
    choice = ExpertChoice(1, trains=False, records=False)
    shapes = r"layer 1: a routing of shape \[1, 2\] .* chooses \[3, 2\]"
    with pytest.raises(ValueError, match=shapes), choice.forward(torch.tensor([[0, 1]])):
        route(SCORES, choice)
