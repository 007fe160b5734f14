"""Load a checkpoint with plain transformers, in programs without Megatron and ms-swift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto import modeling_auto as auto


def takes_media(folder: str | Path) -> bool:
    return AutoConfig.from_pretrained(folder).model_type in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def load_plain(folder: str | Path, **options: Any) -> Any:
    """Return what from_pretrained returns of the whole model.

    Qwen2.5-Omni has its own, which reads its speakers as well and fails with output_loading_info.
    """
    auto_class = AutoModelForMultimodalLM if takes_media(folder) else AutoModelForCausalLM
    model_class = auto_class._model_mapping[type(AutoConfig.from_pretrained(folder))]
    return PreTrainedModel.from_pretrained.__func__(model_class, folder, **options)


def logits_of(model: Any, tokens: Any) -> Any:
    """Return the logits [n, vocabulary] of one sequence; of a Qwen-Omni, which generates speech, of its thinker."""
    part = model.thinker if hasattr(model, "thinker") else model
    return part(tokens, use_cache=False).logits[0]
