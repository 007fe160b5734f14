"""Sizes and configs of tiny random text models, and a byte-level tokenizer for all of them.

`TEXT_CONFIGS` has one entry per `model_type` of transformers. composites.py has models with images or with linear
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
VOCABULARY = 264  # 256 bytes, the special tokens and, as in real models, a few unused rows
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(named: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and a ChatML template.

    `named`: special tokens that are attributes of it, by the name of the attribute.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *(named or {}).values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. vLLM's attention on a CPU needs heads of at least 32."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    expert_ffn: int
    positions: int


TINY = Sizes(128, 256, 4, 4, 2, 32, 4, 96, 2048)  # experts are not square: a transposed one must not fit
# Sizes that the parallel layouts of real scripts divide, where the real model's are not at hand.
LARGE = Sizes(4096, 12288, 48, 64, 8, 64, 128, 1536, 262144)

Values = dict[str, Any]  # of a config.json


def text_values(sizes: Sizes) -> Values:
    """Return what the configs of all types have."""
    tokenizer = make_tokenizer()
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def expert_values(sizes: Sizes) -> Values:
    return {
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }


def shared_expert_values(sizes: Sizes, scale: float) -> Values:
    """Return a dense layer before the mixtures, a shared expert, and sigmoid scores that are scaled."""
    return {
        "first_k_dense_replace": 1,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_ffn,
        "norm_topk_prob": True,
        "routed_scaling_factor": scale,
    }


def _deepseek_v3(sizes: Sizes) -> Values:
    """Return latent attention, and routing within groups."""
    half = sizes.head_dim // 2
    latent = {"q_lora_rank": sizes.hidden // 2, "kv_lora_rank": sizes.hidden // 4}
    heads = dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), half)
    groups = {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
    # transformers does not read these two; in released checkpoints they announce the bias of the router
    bias = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    attention = {"num_key_value_heads": sizes.heads, **latent, **heads}
    return text_values(sizes) | attention | shared_expert_values(sizes, 2.5) | groups | bias


TEXT_CONFIGS: Mapping[str, Callable[[Sizes], Values]] = {
    "llama": text_values,
    "qwen2": text_values,
    "qwen3": text_values,
    "qwen3_moe": lambda sizes: text_values(sizes) | expert_values(sizes),
    "deepseek_v3": _deepseek_v3,
}
