"""flash-linear-attention's module tree, as far as megatron-core and mcore-bridge import it. Called by `activate()`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from swift_megatron_grpo.platforms.cpu.linear_attention.convolution import causal_conv1d
from swift_megatron_grpo.platforms.cpu.linear_attention.delta_rule import chunk_gated_delta_rule, l2norm
from swift_megatron_grpo.platforms.cpu.stand_in import module_tree

NAME = "fla"
_CONTENTS: dict[str, dict[str, Any]] = {
    "modules": {},
    "modules.conv": {},
    "modules.conv.causal_conv1d": {"causal_conv1d": causal_conv1d},
    "modules.convolution": {"causal_conv1d": causal_conv1d},
    "modules.l2norm": {"l2norm": l2norm},
    "ops": {},
    "ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}


def install() -> None:
    """Install the tree. An installed flash-linear-attention is hidden: its Triton kernels need a GPU.

    transformers finds the tree in sys.modules as well and computes with it, so a reference for a test must be computed
    in a process without the platform.
    """
    sys.modules.update(module_tree(ModuleType(NAME), _CONTENTS))
