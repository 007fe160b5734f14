"""Keeps the expert bias of routers where the checkpoint has it, and reads the losses that MoE layers add.

Upstream:

* `finalize_model_grads` of megatron-core adds `moe_router_bias_update_rate` times the sign of each expert's missing
  load to the bias of a sigmoid-scored router in every optimizer step, and mcore-bridge 1.6.5 turns this on, at a rate
  of 1e-3, for every model that has such a bias (DeepSeek-V3 and others). That balances experts in pretraining. In
  policy optimization it changes the policy by an amount that depends on no reward, no advantage and no learning rate:
  at --lr 1e-30 one step moved a log-prob of a tiny model by 0.13.
* megatron-core adds the gradients of load balancing and z-loss during backward, but keeps their values in a global
  tracker that only a training loop reads, logs and resets. If the loop does not, the values accumulate.

Fix: a rate of 0, unless --megatron_extra_kwargs sets one. Read and reset the tracker once per step, by megatron-core's
own `track_moe_metrics`, which newer versions, 0.18.2 for one, deprecate in favour of a method of the tracker with the
same arguments. Both are megatron-core's design, so there is no upstream fix to wait for.

Tests: tests/dist/test_router_bias.py fails without the fix. tests/e2e/test_cli.py checks the logged
`load_balancing_loss` of a MoE run, and fails if the tracker changes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mcore_bridge import ModelConfig
from mcore_bridge.model import GPTModel
from megatron.core.transformer.moe import moe_utils

_RATE = "moe_router_bias_update_rate"
_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


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


def pop_moe_aux_losses(config: ModelConfig, num_micro_batches: int) -> dict[str, float]:
    """Return the means over layers and micro batches since the last call, under Megatron's names, and reset them.

    All ranks call it. Like their gradients, the values are means over micro batches: unlike the policy loss they depend
    on how samples were packed.
    """
    names = _names(config)
    if not names:
        return {}
    losses: dict[str, torch.Tensor] = {}
    has_tracker = hasattr(moe_utils, "get_moe_metrics_tracker")
    report = moe_utils.get_moe_metrics_tracker().report if has_tracker else moe_utils.track_moe_metrics
    report(
        loss_scale=1 / num_micro_batches,
        iteration=0,  # only a writer uses it, and none is passed
        total_loss_dict=losses,
        force_initialize=True,  # a stage without experts joins the reduction
        track_names=names,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
    )
    return {name: losses[name].item() for name in names}


def _names(config: ModelConfig) -> list[str]:
    if config.num_moe_experts is None:
        return []
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = config.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    names = [_BALANCING[kind] for kind, c in zip(kinds, coefficients, strict=True) if kind in _BALANCING and c]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])
