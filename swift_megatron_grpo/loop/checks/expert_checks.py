"""Checks of the experts that an engine reports, before they are replayed: what no router can have chosen.

A kernel of vLLM that chooses experts itself may leave the rows of its layers at zero: k times the first expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from swift_megatron_grpo.packing.routing import ExpertLayers
from swift_megatron_grpo.types import ExpertRows, Rollout

_ADVICE = "use --router_replay_mode R2 or disabled, and --router_agreement_samples 0"


class WrongExperts(RuntimeError):
    """An engine reports experts that its routers cannot have chosen."""


def check_experts(rollouts: Iterable[Rollout], layers: ExpertLayers) -> None:
    """Raise WrongExperts for the first completion whose experts cannot be those of this model's routers."""
    for rollout in rollouts:
        problem = None if rollout.routed_experts is None else problem_of_rows(rollout.routed_experts, layers)
        if problem is not None:
            raise WrongExperts(f"a completion of prompt {rollout.prompt.prompt_id}: vLLM {problem}; {_ADVICE}")


def problem_of_rows(rows: ExpertRows, layers: ExpertLayers) -> str | None:
    """Return what is wrong with the rows [t - 1, layers, k] of a completion; None: a router may have chosen them."""
    if rows.shape[1:] != (layers.num_layers, layers.k):
        reported, k = rows.shape[1:]
        return f"reports experts of {reported} layers and {k} per token, not {layers.num_layers} and {layers.k}"
    chosen = rows[:, list(layers.with_experts)]  # [t - 1, layers with experts, k]
    if not chosen.size:
        return None
    if int(chosen.max()) >= layers.experts:
        return f"reports the expert {int(chosen.max())}, and the model has {layers.experts} in a layer"
    if layers.k == 1:  # any expert is a choice
        return None
    zero = ~chosen.any(-1)
    if zero.any():
        layer = layers.with_experts[int(np.argwhere(zero)[0, 1])]
        return (
            f"does not report the experts of layer {layer}: a row of it is zero, so the kernel of its experts chooses "
            "them out of sight; another moe_backend in --vllm_engine_kwargs may report them"
        )
    if any((chosen[..., one] == chosen[..., other]).any() for one, other in combinations(range(layers.k), 2)):
        return "reports an expert twice for one token"
    return None


def check_reported(rollouts: Iterable[Rollout], replayed_from_disk: bool) -> None:
    """Raise WrongExperts if no completion of a rollout came with experts, so that R3 would replay nothing."""
    if any(rollout.routed_experts is not None for rollout in rollouts):
        return
    if replayed_from_disk:
        raise WrongExperts(
            "--router_replay_mode R3 replays the experts that vLLM chose, and the dump of --rollout_replay has none: "
            "it was written without --router_replay_mode R3; use R2 or disabled"
        )
    raise WrongExperts(
        "--router_replay_mode R3 replays the experts that vLLM chose, and no completion came with them; use R2 or "
        "disabled"
    )
