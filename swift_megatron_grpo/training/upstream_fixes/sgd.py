"""Lets a run with --optimizer sgd load the optimizer's state; megatron-core 0.16.1 to 0.19.2.

Before Megatron reads a checkpoint, it calls a function that makes an optimizer's empty state. It builds SGD without
one, and calls None.
"""

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer


def supply_states(optimizer: MegatronOptimizer) -> None:
    """Set the function where it is missing."""
    links = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for link in links:
        if link.init_state_fn is None:
            link.init_state_fn = _make_momenta


def _make_momenta(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
