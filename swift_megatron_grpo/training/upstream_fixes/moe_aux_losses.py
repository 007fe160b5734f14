"""Reads the losses that Megatron's MoE layers add to the gradient: load balancing and z-loss.

Upstream: megatron-core adds their gradients during backward, but keeps their values in a global tracker that
only a training loop reads, logs and resets. If the loop does not, the values accumulate and are never logged.

Fix: read and reset the tracker once per step, with megatron-core's own function: `track_moe_metrics`, which newer
versions, 0.18.2 for one, deprecate in favour of a method of the tracker, with the same arguments.

Tests: tests/e2e/test_cli.py checks the logged `load_balancing_loss` of a MoE run, and fails if the tracker changes. It
is megatron-core's design that the loop does this, so there is no upstream fix to wait for.
"""

from __future__ import annotations

from typing import Any

import torch
from mcore_bridge import ModelConfig
from megatron.core.transformer.moe import moe_utils

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def pop_moe_aux_losses(config: ModelConfig, num_micro_batches: int) -> dict[str, float]:
    """Return the means over layers and micro batches since the last call, under Megatron's names, and reset them.

    All ranks call it. Like their gradients, the values are means over micro batches: unlike the policy loss they depend
    on how samples were packed.
    """
    names = _names(config)
    if not names:
        return {}
    losses: dict[str, torch.Tensor] = {}
    _report_and_reset(
        loss_scale=1 / num_micro_batches,
        iteration=0,  # only a writer uses it, and none is passed
        total_loss_dict=losses,
        force_initialize=True,  # a stage without experts joins the reduction
        track_names=names,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
    )
    return {name: losses[name].item() for name in names}


def _report_and_reset(**settings: Any) -> None:
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().report(**settings)
    else:
        moe_utils.track_moe_metrics(**settings)


def _names(config: ModelConfig) -> list[str]:
    if config.num_moe_experts is None:
        return []
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = config.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    names = [_BALANCING[kind] for kind, c in zip(kinds, coefficients, strict=True) if kind in _BALANCING and c]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])
