"""Detects whether an engine holds the image, video and audio parts of its model, and counts the tokens of images."""

from __future__ import annotations

from typing import Any

from swift.infer_engine import GRPOVllmEngine
from swift.template import Template


def has_towers(model_config: Any) -> bool:
    """Return True unless the model is a text model, or vLLM has left its towers out: all limits on media are 0."""
    if not model_config.is_multimodal_model:
        return False
    if hasattr(model_config, "supports_multimodal_inputs"):
        return bool(model_config.supports_multimodal_inputs)
    from vllm.multimodal import MULTIMODAL_REGISTRY  # vLLM before 0.32 asks its registry

    return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config))


def images_per_prompt(model_config: Any) -> int:
    """Return how many images a prompt may have; 0 if the engine takes none."""
    if not has_towers(model_config):
        return 0
    return int(model_config.multimodal_config.get_limit_per_prompt("image"))


def placeholder_tokens(template: Template) -> frozenset[int]:
    """Return the tokens that stand for parts of images and videos; none for a text model."""
    if not template.model_meta.is_multimodal:
        return frozenset()
    return frozenset((template.processor.image_token_id, template.processor.video_token_id))


class EngineForImages(GRPOVllmEngine):
    """ms-swift's engine, which counts an image with all its tokens.

    ms-swift counts the one placeholder that vLLM replaces, so its limits on completions are too large.
    """

    def _get_num_tokens(self, inputs: dict[str, Any], batch_idx: int | None = None) -> int:
        tokens: int = GRPOVllmEngine._get_num_tokens(inputs, batch_idx)
        images = inputs.get("images") or []  # which the template has resized
        if not images:
            return tokens
        processor = self.template.processor.image_processor
        side: int = processor.patch_size * processor.merge_size  # of the square that becomes one token
        return tokens + sum(int(image.width) * int(image.height) // side**2 - 1 for image in images)
