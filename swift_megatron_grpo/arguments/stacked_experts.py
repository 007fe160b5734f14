"""Refuses a Qwen3-VL mixture of experts that transformers has saved again, whose experts lie the other way round.

The released checkpoints have [experts, inputs, outputs], and transformers turns them when it loads. Its save_pretrained
does not turn them back. mcore-bridge and vLLM take every checkpoint for a released one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_megatron_grpo.generation.protocol.model_identity import language_config
from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_TURNED = "qwen3_vl_moe"  # the one model_type of COMPOSITE whose released experts are turned


def check_stacked_experts(model: str, folder: str | Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the experts are not as released. `config`: the content of config.json."""
    if config.get("model_type") != _TURNED:
        return
    text = language_config(config)
    hidden, intermediate = text["hidden_size"], text["moe_intermediate_size"]
    released = {"gate_up_proj": (hidden, 2 * intermediate), "down_proj": (intermediate, hidden)}
    for name, tensor in stored_tensors(folder).items():
        wanted = released.get(name.rpartition("mlp.experts.")[2])
        if wanted is not None and tensor.shape[1:] != wanted:
            raise ValueError(
                f"--model {model}: {name} is {list(tensor.shape)}, and the released checkpoints of {_TURNED} have "
                f"{[tensor.shape[0], *wanted]}: transformers' save_pretrained does not turn experts back, and neither "
                "Megatron nor vLLM can load them; use the released checkpoint, or exchange the last two dimensions of "
                "every mlp.experts.gate_up_proj and mlp.experts.down_proj"
            )
