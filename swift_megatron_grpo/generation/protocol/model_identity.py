"""The values of config.json that must be equal in trainer and server."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Keys of config.json. Models with equal values can load the same weights.
MODEL_KEYS = (
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip


def model_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json; those of the language model take precedence."""
    text = language_config(config)
    return {key: text[key] for key in MODEL_KEYS if text.get(key) is not None}


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the language model, which models of several parts nest; Qwen-Omni nests them twice."""
    for part in ("thinker_config", "llm_config", "language_config", "text_config"):
        if isinstance(config.get(part), dict):
            return {**config, **language_config(config[part])}
    return dict(config)


def media_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the image and audio parts; Qwen-Omni nests it."""
    part: Mapping[str, Any] = config.get("thinker_config", config)
    return part


def position_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions are scaled, which a run may change (--rope_scaling)."""
    text = language_config(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":  # the former name of unscaled positions of images
        kind = "default"
    identity = {"rope_type": kind, "rope_factor": None if kind == "default" else rope.get("factor")}
    known = {
        "rope_theta": rope.get("rope_theta", text.get("rope_theta")),
        "rope_original_length": None if kind == "default" else rope.get("original_max_position_embeddings"),
    }
    return identity | {key: value for key, value in known.items() if value is not None}


def precision_identity(dtype: torch.dtype) -> dict[str, Any]:
    return {"torch_dtype": str(dtype).removeprefix("torch.")}


def read_model_config(folder: str | Path) -> Mapping[str, Any]:
    """Return the content of config.json in a folder. It is read once, because every stage asks for it."""
    return _read(Path(folder).expanduser().resolve() / "config.json")


@cache
def _read(file: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config
