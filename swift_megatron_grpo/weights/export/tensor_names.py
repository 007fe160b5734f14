"""Names of tensors in a checkpoint, and the part of the model that each belongs to."""

from __future__ import annotations

import re

from mcore_bridge.config import ModelConfig

_PREDICTION = r"(^|\.)mtp([._]|$)"
_LAYER = r"(?:^|\.)layers\.(\d+)\."


def vision_tower_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return the name prefixes of image, video and audio parts; () for a text model.

    Models that were released before transformers 4.52 have other names in checkpoints than in transformers:
    hf_state_dict_mapping has pairs of the two.
    """
    towers = config.model_meta.visual_cls
    if towers is None:
        return ()
    released = config.model_meta.bridge_cls.hf_state_dict_mapping
    aliases = [old for old, new in released.items() if new in towers.module_mapping]
    return tuple(f"{name}." for name in (*towers.module_mapping, *aliases))


def is_copy_of_embedding(name: str, config: ModelConfig) -> bool:
    """Return True for the output layer of a model that shares the weights of its embedding."""
    return name.endswith("lm_head.weight") and not config.untie_embeddings_and_output_weights


def is_prediction_layer(name: str, config: ModelConfig) -> bool:
    """Return True for multi-token prediction; some models number its layers after the decoder's."""
    if re.search(_PREDICTION, name):
        return True
    layer = re.search(_LAYER, name)
    return (
        layer is not None and int(layer[1]) >= config.num_layers and not name.startswith(vision_tower_prefixes(config))
    )


def is_unbuilt_vision_tower(name: str, config: ModelConfig) -> bool:
    """Return True for a part that embeds images, video or audio, with --language_model_only."""
    return bool(config.language_model_only) and name.startswith(vision_tower_prefixes(config))
