"""Marks expert weights as experts when expert parallelism is off, so that their gradients are reduced completely.

Upstream: Megatron reduces the gradient of a parameter over all data-parallel ranks or, if the parameter is marked as an
expert's (`allreduce` False), over the expert-data-parallel ranks. megatron-core 0.16.1 to 0.18.2 sets the mark only if
expert parallelism is on; 0.19.2 sets it as this file does, and nothing changes there. With tensor parallelism, whole
experts and no expert parallelism (--tensor_model_parallel_size 2 and ms-swift's default of 1 for the two expert sizes),
each tensor-parallel rank runs the experts on its own part of the tokens, and the gradients of the other ranks are never
added. On a small model an expert's gradient was 10 to 25 % of the correct one.

Fix: set the mark before the models are wrapped in DDP, which sorts parameters into buffers by it.

Tests: tests/unit/training/upstream_fixes/test_upstream_marks.py names the version that sets the mark itself; delete
this file once no older one is supported. tests/dist/test_layouts.py[moe-full-tp2+sp] fails without the fix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core import mpu
from megatron.core.extensions.transformer_engine import TEGroupedLinear


def mark_experts(models: Iterable[torch.nn.Module]) -> None:
    """Mark the parameters of all experts in `models`, which must not be wrapped in DDP yet."""
    if mpu.get_expert_tensor_parallel_world_size() == mpu.get_tensor_model_parallel_world_size():
        return  # without expert parallelism the two groups are the same; with it upstream's marks are right
    for model in models:
        for name, module in model.named_modules():
            # A layer's experts are one module or a list of modules; adapters are modules of the same kind inside them.
            if isinstance(module, TEGroupedLinear) or ".local_experts." in name:
                for parameter in module.parameters():
                    parameter.allreduce = False
