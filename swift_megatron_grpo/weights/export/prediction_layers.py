"""The layers of multi-token prediction of a checkpoint, for an engine that drafts with them. They are not trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open


def is_prediction(name: str) -> bool:
    return name.startswith("mtp.")  # in every type of model with which drafts are compared (settings/speculation.py)


def stored_prediction_layers(folder: str | Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Read them, in the type of the engine."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in filter(is_prediction, sorted(stored.keys())):
                yield name, stored.get_tensor(name).to(torch.cuda.current_device(), dtype)
