"""An external plugin that injects a fault: half of the adapter is sent under names that no module has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import swift_megatron_grpo.weights.export.export as export

export_adapter = export.export_adapter


def misname(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in export_adapter(*args):
        yield name.replace("mlp", "feed_forward"), tensor


vars(export)["export_adapter"] = misname
