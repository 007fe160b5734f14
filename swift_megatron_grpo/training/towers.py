"""Composite models: a language model, and towers that embed images, video or audio for it.

mcore-bridge builds them as a wrapper with `language_model` and, on the first pipeline stage, `visual`. This trainer
trains the language model on text. The towers are loaded, kept as they are, and saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from mcore_bridge.model import GPTModel, MultimodalGPTModel


def is_composite(model: torch.nn.Module) -> bool:
    return isinstance(model, MultimodalGPTModel)


def language_model(model: torch.nn.Module) -> GPTModel:
    """Return the part that computes hidden states and log-probs; a text model is its own."""
    return model.language_model if isinstance(model, MultimodalGPTModel) else model


def skip_towers(models: Iterable[torch.nn.Module]) -> None:
    """Embed text without running the towers.

    Upstream runs a tower on a blank image in every micro batch without images, and adds 0 times the result, so that its
    weights have a gradient. Frozen towers need none. What a model does to the embeddings themselves stays.
    """
    for model in models:
        towers: Any = model.visual if is_composite(model) else None
        if towers is not None:
            towers.get_inputs_embeds = towers.get_inputs_embeds_language_model
