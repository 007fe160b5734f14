"""The layers of multi-token prediction of a checkpoint, for an engine that drafts with them while none is trained."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open


def is_prediction(name: str) -> bool:
    return name.startswith("mtp.")  # in every type of model with which drafts are compared (settings/speculation.py)


def stored_prediction_layers(
    folder: str | Path, dtype: torch.dtype
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Return what yields them in the type of the engine. Files are read once: every sync sends the same tensors."""

    @cache
    def on_host() -> list[tuple[str, torch.Tensor]]:
        found = []
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                names = filter(is_prediction, sorted(stored.keys()))
                found += [(name, stored.get_tensor(name).to(dtype)) for name in names]
        return found

    return lambda: ((name, tensor.to(torch.cuda.current_device())) for name, tensor in on_host())
