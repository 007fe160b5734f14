"""Models in place of a script's: a tiny random one of the same type, and the config.json of a large one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto as auto

from swift_megatron_grpo.cli.tiny_models.composites import (
    KINDS,
    Shape,
    make_config,
    save_composite,
    tokenizer_for_images,
)
from swift_megatron_grpo.cli.tiny_models.text import LARGE, TEXT_CONFIGS, TINY, make_tokenizer

TYPES = (*TEXT_CONFIGS, *KINDS)  # of transformers


def model_type_of(architecture: str) -> str | None:
    """Return the model_type of a class of transformers such as Qwen3ForCausalLM; None if it is unknown."""
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return next((str(model_type) for model_type, name in names.items() if name == architecture), None)


def save_tiny_model(folder: Path, model_type: str, seed: int = 0) -> Path:
    """Write a random model of one of TYPES, with its tokenizer."""
    if model_type in KINDS:
        save_composite(folder, Shape(model_type, TINY), seed)
        return folder
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **TEXT_CONFIGS[model_type](TINY))
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_large_config(folder: Path, model_type: str, architecture: str) -> Path:
    """Write only the config.json and the tokenizer of a large model, for checks that load no weights."""
    if model_type in KINDS:
        tokenizer = tokenizer_for_images(model_type)
        config = make_config(tokenizer, Shape(model_type, LARGE, interval=4))
    else:
        tokenizer, config = make_tokenizer(), AutoConfig.for_model(model_type, **TEXT_CONFIGS[model_type](LARGE))
    tokenizer.save_pretrained(folder)
    values = config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
