"""The types that mcore-bridge 1.6.5 converts, by model_type of config.json: trained, or refused with the reason.

A text type is trained if a tiny model has been compared with plain transformers. A composite model, which is a language
model with an image, video or audio part, is trained if a test compares it on text and images.
scripts/write_support_table.py writes the table in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping

# model_type of config.json; all have images and videos
COMPOSITE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "internvl",
)  # fmt: skip
INTERNVL_LANGUAGES = ("qwen2", "qwen3", "qwen3_moe")
# Text types that tests compare with plain transformers, those that were compared once, by hand, with log-probs within
# 2e-6, and those that mcore-bridge reads exactly as one of them.
TEXT = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3")
COMPARED = (
    "deepseek_v2", "dots1", "ernie4_5", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3", "minimax_m2", "olmoe",
    "qwen2_moe",
)  # fmt: skip
READ_AS = {"internlm3": "llama", "kimi_k2": "deepseek_v3", "mimo": "qwen2"}
_CODE_IN_CHECKPOINT = "its code is part of the checkpoint (trust_remote_code), so no test can make a small one"
_HYBRID = "its language model is not a GPTModel of mcore-bridge, whose output layer this trainer replaces"
_GEMMA4 = (
    "mcore-bridge 1.6.5 reads global_head_dim, which transformers 5.19 has no longer, and its text needs token types"
)
_UNTESTED = "no test has compared it with plain transformers yet"
_SPARSE = "megatron-core 0.16.1 and 0.18.2 have no sparse attention (DSA) of packed sequences"
# Text types that mcore-bridge 1.6.5 converts, and the reason why this trainer refuses them.
REFUSED_TEXT: Mapping[str, str] = {
    "bailing_hybrid": _CODE_IN_CHECKPOINT,
    "bailing_moe": _CODE_IN_CHECKPOINT,
    "deepseek": _CODE_IN_CHECKPOINT,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "no megatron-core up to 0.19.2 has its attention (dsv4_hybrid)",
    "ernie4_5_moe": "mcore-bridge 1.6.5 does not read the bias of its routers (moe_statics.e_score_correction_bias)",
    "glm_moe_dsa": _SPARSE,
    "nemotron_h": _HYBRID,
}
# Types that mcore-bridge 1.6.5 converts, and the reason why this trainer refuses them; it converts deepseek_v41 with a
# newer megatron-core only.
REFUSED_COMPOSITE: Mapping[str, str] = {
    "deepseek_v41": _HYBRID,
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "glm5_next": _HYBRID,
    "internvl_chat": _CODE_IN_CHECKPOINT,
    "kimi_k25": _UNTESTED,
    "kimi_vl": _CODE_IN_CHECKPOINT,
    "llama4": "its chunked attention has not been compared with plain transformers yet",
    "llava_onevision1_5": _CODE_IN_CHECKPOINT,
    "minicpmv4_6": _UNTESTED,
    "muse_glimmer": _UNTESTED,
    "ovis2_5": _CODE_IN_CHECKPOINT,
    "qwen2_5_omni": "it has audio and speech parts, which no test covers yet",
    "qwen3_asr": "it transcribes audio, and rows with audio are not trained",
    "qwen3_omni_moe": "it has audio and speech parts, which no test covers yet",
    "qwen4_exp": "beyond indexer_budget tokens its attention needs a GPU, where no test has compared it yet",
}
