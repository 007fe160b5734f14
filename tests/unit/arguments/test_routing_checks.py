"""Router replay is refused where it could replay nothing, by flag and with a value that works."""

from __future__ import annotations

import re

import pytest

from swift_megatron_grpo.settings.layout import ModelShape
from swift_megatron_grpo.settings.routing import RouterReplay, Routing
from tests.unit.settings.flags import faults, of


def routing_faults(replay: RouterReplay, compared: int, experts: int | None, balancing: list[str]) -> str:
    shape = ModelShape("m", None, None, None, None, experts, None)
    typed = {"router_replay_mode": replay, "router_agreement_samples": compared, "model": "m"}
    return faults(Routing, shape=shape, **typed, moe_router_load_balancing_type=balancing)


@pytest.mark.parametrize("replay", ["disabled", "R2", "R3"])
def test_mixtures_of_experts_are_accepted(replay: RouterReplay) -> None:
    assert routing_faults(replay, 16, 8, ["aux_loss", "seq_aux_loss"]) == ""


def test_a_dense_model_is_accepted_without_replay() -> None:
    assert routing_faults("disabled", 0, None, []) == ""


@pytest.mark.parametrize(
    ("replay", "compared", "experts", "balancing", "problem"),
    [
        ("R2", 0, None, [], r"^--router_replay_mode R2: --model m is dense"),
        ("R3", 4, None, [], r"^--router_replay_mode R3 and --router_agreement_samples 4: --model m is dense"),
        ("R3", 0, 8, ["sinkhorn"], "sinkhorn chooses experts .* use --moe_router_load_balancing_type aux_loss"),
        ("disabled", -1, 8, [], r"--router_agreement_samples -1 must be at least 0; use --router_agreement_samples 16"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    replay: RouterReplay, compared: int, experts: int | None, balancing: list[str], problem: str
) -> None:
    assert re.search(problem, routing_faults(replay, compared, experts, balancing))


def test_r2_without_effect_is_noted() -> None:
    [note] = of(Routing, router_replay_mode="R2").notes(1)
    assert note.startswith("--router_replay_mode R2: without effect")
    assert of(Routing, router_replay_mode="R2").notes(2) == of(Routing, router_replay_mode="R3").notes(1) == []


def test_experts_are_requested_for_all_or_for_compared_completions() -> None:
    def requested(replay: RouterReplay, compared: int, completions: int) -> int:
        routing = of(Routing, router_replay_mode=replay, router_agreement_samples=compared)
        return routing.requested(completions)

    assert requested("R3", 0, 100) == 100 and requested("R2", 0, 100) == 0
    assert requested("disabled", 16, 100) == 16 and requested("R2", 16, 8) == 8
