"""The modules that Megatron may build for a language model: known from its config.json, before it is built."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What ms-swift expands, each with a module that it selects; --modules_to_save has the first one only.
_KINDS: Mapping[str, str] = {"all-embedding": "embedding", "all-linear": "linear_proj", "all-router": "router"}
_COMMON = (
    "input_layernorm self_attention self_attention.core_attention self_attention.linear_proj pre_mlp_layernorm mlp "
    "mlp.linear_fc1 mlp.linear_fc2"
)
_GROUPED_QUERIES = "self_attention.linear_qkv self_attention.q_layernorm self_attention.k_layernorm"
_LATENT = (
    "self_attention.linear_q_proj self_attention.linear_q_down_proj self_attention.linear_q_up_proj "
    "self_attention.linear_kv_down_proj self_attention.linear_kv_up_proj self_attention.q_layernorm "
    "self_attention.kv_layernorm"
)
_LINEAR = (
    "self_attention.in_proj self_attention.in_proj_qkvz self_attention.in_proj_ba self_attention.conv1d "
    "self_attention.out_norm self_attention.out_proj"
)
_EXPERTS = (
    "mlp.router mlp.experts mlp.experts.linear_fc1 mlp.experts.linear_fc2 mlp.shared_experts "
    "mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2"
)
# Of single families (GLM, OLMoE, MiniMax, Bailing, DeepSeek-V4): what their config.json has in common is not known.
_RARE = (
    "post_self_attn_layernorm post_mlp_layernorm self_attention.q_norm self_attention.k_norm self_attention.g_proj "
    "self_attention.g_norm self_attention.query_key_value self_attention.linear_o_group_proj "
    "self_attention.core_attention.indexer.linear_wq_b self_attention.core_attention.indexer.linear_wk "
    "self_attention.core_attention.indexer.linear_weights_proj"
)
# by names of transformers
_IN_MEGATRON: Mapping[str, str] = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "qkv_proj": "linear_qkv",
    "o_proj": "linear_proj", "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "gate_up_proj": "linear_fc1",
    "down_proj": "linear_fc2", "embed_tokens": "all-embedding", "lm_head": "output_layer",
}  # fmt: skip


def module_paths(text: Mapping[str, Any], has_experts: bool) -> tuple[str, ...]:
    """Return the paths of the modules, such as decoder.layers.0.mlp. `text`: the config.json of a language model."""
    parts = f"{_COMMON} {_RARE} {_LATENT if 'kv_lora_rank' in text else _GROUPED_QUERIES}"
    parts += f" {_LINEAR}" if "linear_num_key_heads" in text else ""
    parts += f" {_EXPERTS}" if has_experts else ""
    layers = [f"decoder.layers.{n}" for n in range(text.get("num_hidden_layers") or 0)]
    if not layers:
        return ()
    ends = ["embedding", "embedding.word_embeddings", "decoder", "decoder.layers", "decoder.final_layernorm"]
    output = [] if text.get("tie_word_embeddings") else ["output_layer"]
    return (*ends, *layers, *(f"{layer}.{part}" for layer in layers for part in parts.split()), *output)


def fault_of_names(flag: str, typed: Sequence[str], paths: Iterable[str]) -> str | None:
    """Return which of these names match no module, and what to type; None: each has one. peft compares the ends."""
    kinds = _KINDS if flag == "target_modules" else {"all-embedding": "embedding"}
    dotted = [f".{path}" for path in paths]
    unmatched = [name for name in typed if not any(path.endswith(f".{kinds.get(name, name)}") for path in dotted)]
    if not unmatched:
        return None
    known = sorted({path.rpartition(".")[2] for path in dotted} | {*kinds} - {*unmatched})
    nearest = {
        name: next(iter(difflib.get_close_matches(name.rpartition(".")[2], known, n=1)), None) for name in unmatched
    }
    right = dict.fromkeys(_IN_MEGATRON.get(name) or nearest.get(name, name) for name in typed)
    advice = f"use --{flag} {' '.join(filter(None, right))}" if any(right) else "leave it out"
    if set(unmatched) <= _IN_MEGATRON.keys():
        reason = "these are names of transformers, and no layer of Megatron has them"
    else:
        reason = "this model has no modules of that name in Megatron"
    return f"--{flag} {' '.join(unmatched)}: {reason}; {advice}"


def frozen(paths: Iterable[str], names: Sequence[str], pattern: str | None) -> list[bool]:
    """Return, for the weights of each module, if ms-swift's prefixes of names or its pattern match them."""
    weights = [f"{path}.weight" for path in paths]
    return [weight.startswith(tuple(names)) or bool(pattern and re.search(pattern, weight)) for weight in weights]
