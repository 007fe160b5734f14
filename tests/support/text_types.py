"""Tiny random models of text types, saved as their released checkpoints are.

swift_megatron_grpo/cli/tiny_models makes those of the types that other tests train: qwen3, qwen3_moe, qwen3_next and
deepseek_v3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swift_megatron_grpo.cli.tiny_models import (
    Shape,
    Sizes,
    Values,
    draw_weights,
    make_tokenizer,
    shared_expert_values,
    text_values,
)

_SIZES = Sizes(hidden=128, intermediate=160, layers=2, heads=4, kv_heads=2, head_dim=32, experts=4, expert_ffn=96,
               positions=2048)  # fmt: skip
_EXPERTS: Values = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_DENSE_FIRST = {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"]}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
}  # fmt: skip
# What a config.json of each type has besides the sizes. transformers does not read `scoring_func` and other entries
# that mcore-bridge or vLLM read.
CONFIGS: dict[str, Values] = {
    "deepseek_v2": shared_expert_values(_SIZES, 1.5)
    | _LATENT
    | {"topk_method": "greedy", "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    "dots1": shared_expert_values(_SIZES, 1.5)
    | {"n_group": 1, "topk_group": 1, "max_window_layers": 2, "sliding_window": None, "scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": shared_expert_values(_SIZES, 1.5)
    | {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": True},
    # transformers has 1e-6 in the norms of latent attention, whatever rms_norm_eps says
    "glm4_moe_lite": shared_expert_values(_SIZES, 1.5)
    | _LATENT
    | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
    # experts are square, as released
    "gpt_oss": _EXPERTS | {"num_local_experts": 4, "sliding_window": 16, "intermediate_size": _SIZES.hidden},
    "hy_v3": _EXPERTS
    | _DENSE_FIRST
    | {"num_experts": 4, "moe_intermediate_size": 96, "expert_hidden_dim": 96, "num_shared_experts": 1,
       "router_scaling_factor": 1.5, "qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True,
       "moe_router_enable_expert_bias": True},
    "llama": {},
    "minimax_m2": _EXPERTS
    | {"num_local_experts": 4, "intermediate_size": 96, "scoring_func": "sigmoid", "use_routing_bias": True,
       "use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 16},
    "olmoe": _EXPERTS | {"num_experts": 4, "intermediate_size": 96, "norm_topk_prob": False},
    "qwen2": {},
    "qwen2_moe": _EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "norm_topk_prob": False,
       "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip
WITH_EXPERTS = [name for name, values in CONFIGS.items() if "num_experts_per_tok" in values]
# vLLM on a CPU has no latent attention of these head sizes, and routers with softmax scores alone.
IN_VLLM_ON_CPU = [name for name in CONFIGS if name not in ("deepseek_v2", "glm4_moe_lite", "minimax_m2")]


def make_text_model(model_type: str) -> PreTrainedModel:
    """Return the model, with a bias in its routers and other vectors away from the values at which none would show."""
    config = AutoConfig.for_model(model_type, **(text_values(_SIZES) | CONFIGS[model_type]))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    draw_weights(model, Shape(model_type, _SIZES), seed=0)
    generator = torch.Generator().manual_seed(0)
    others: dict[str, Any] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, tensor in others.items():
        if name.endswith(("e_score_correction_bias", "sinks")):
            tensor.data.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model.to(torch.bfloat16)


def save_text_type(folder: Path, model_type: str) -> Path:
    """Write the model and its byte-level tokenizer."""
    make_text_model(model_type).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
