"""Random weights in place of a checkpoint's, the same in every process: writing and loading them takes longer."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from mcore_bridge import unwrap_model
from mcore_bridge.bridge import GPTBridge

from benchmarks.harness.shapes import DEVIATION


def draw_weights() -> None:
    """Make mcore-bridge draw the weights of a model instead of loading them."""

    def load_weights(self: Any, models: Iterable[torch.nn.Module], folder: str, **kwargs: Any) -> None:
        if kwargs.get("peft_format"):
            raise RuntimeError("a benchmark with random weights has no adapters to load")
        self._source_model_dir = folder
        for model in unwrap_model(models):
            fill(model)

    GPTBridge.load_weights = load_weights


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Draw matrices from each parameter's name; scales of norms are 1, biases 0."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(0, DEVIATION, generator=generator)
        else:
            parameter.fill_("norm" in name)
