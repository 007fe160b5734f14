"""Detects whether an engine holds the image, video and audio parts of its model."""

from __future__ import annotations

from typing import Any


def has_towers(model_config: Any) -> bool:
    """Return True unless the model is a text model, or vLLM has left its towers out: all limits on media are 0."""
    if not model_config.is_multimodal_model:
        return False
    if hasattr(model_config, "supports_multimodal_inputs"):
        return bool(model_config.supports_multimodal_inputs)
    from vllm.multimodal import MULTIMODAL_REGISTRY  # vLLM before 0.32 asks its registry

    return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config))
