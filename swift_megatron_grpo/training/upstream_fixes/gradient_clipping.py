"""Makes Megatron clip gradients with Transformer Engine's kernels where it has missed them.

Upstream: from megatron-core 0.17 on, `optimizer/clip_grads.py` imports four functions of Transformer Engine in one
statement. Transformer Engine has one of them, `multi_tensor_scale_tensor`, from 2.14 on. With 2.11 to 2.13 the whole
statement fails, and Megatron falls back to Python loops: one kernel and one copy to the host per gradient for the norm,
and two kernels per gradient to scale it. The numbers are the same, and one warning says that Transformer Engine is not
installed.

Fix: set the three functions that are there, which are all that megatron-core 0.16.1 uses. Nothing is set if Megatron
has found the kernels itself.

Tests: tests/unit/training/upstream_fixes/test_gradient_clipping.py fails once upstream imports them one by one; then
delete this file. The file can also go with support for Transformer Engine below 2.14.
"""

from __future__ import annotations

import importlib

from megatron.core import utils
from megatron.core.optimizer import clip_grads

_KERNELS = {
    "multi_tensor_applier": "multi_tensor_applier",
    "l2_norm_impl": "multi_tensor_l2norm",
    "multi_tensor_scale_impl": "multi_tensor_scale",
}


def clip_with_transformer_engine() -> None:
    """Replace Megatron's loops by Transformer Engine's kernels, if there are any."""
    if clip_grads.multi_tensor_applier is not utils.local_multi_tensor_applier:
        return
    try:
        optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
        kernels = {name: getattr(optimizers, kernel) for name, kernel in _KERNELS.items()}
    except (ImportError, AttributeError):
        return  # the loops are slow but right
    for name, kernel in kernels.items():
        setattr(clip_grads, name, kernel)
