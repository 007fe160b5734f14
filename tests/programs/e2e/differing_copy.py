"""External plugin for a trainer under test: rank 1 exports one weight that differs from that of the other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from swift_megatron_grpo.weights.export.export import WeightExport

original_call = WeightExport.__call__


def differing_call(self: WeightExport) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in original_call(self):
        yield name, tensor + 1e-6 if name.endswith("layers.1.mlp.up_proj.weight") else tensor


if os.environ["RANK"] == "1":
    WeightExport.__call__ = differing_call  # type: ignore[method-assign]
