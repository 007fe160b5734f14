"""Keeps the expert bias of a sigmoid-scored router where the checkpoint has it.

Upstream: `finalize_model_grads` of megatron-core adds `moe_router_bias_update_rate` times the sign of each expert's
missing load to the bias in every optimizer step, and mcore-bridge 1.6.5 turns this on, at a rate of 1e-3, for every
model that has such a bias (DeepSeek-V3 and others). That balances experts in pretraining. In policy optimization it
changes the policy by an amount that depends on no reward, no advantage and no learning rate: at --lr 1e-30 one step
moved a log-prob of a tiny model by 0.13.

Fix: a rate of 0, unless --megatron_extra_kwargs sets one.

Tests: tests/dist/test_router_bias.py fails without the fix. The rate is megatron-core's design, so there is no upstream
fix to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mcore_bridge.model import GPTModel

_RATE = "moe_router_bias_update_rate"


def freeze_router_bias(models: Iterable[GPTModel], extra_kwargs: Mapping[str, Any] | None) -> str | None:
    """Set the update rate to 0, unless the user has set one. Return a note for the log; None: there is no such bias."""
    biased = [model.config for model in models if model.config.moe_router_enable_expert_bias]
    if not biased:
        return None
    if _RATE in (extra_kwargs or {}):
        return f"the routers' expert bias moves by {getattr(biased[0], _RATE):g} in every step, whatever --lr is"
    for config in biased:
        setattr(config, _RATE, 0.0)
    return (
        "the routers' expert bias stays that of the checkpoint; to move it by 0.001 in every step, as Megatron does in "
        f"pretraining, use --megatron_extra_kwargs '{{\"{_RATE}\": 0.001}}'"
    )
