"""Configs of tiny Qwen-Omni models: a thinker with image and audio parts, and a talker and a vocoder, all random."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from transformers import AutoConfig

_MEDIA = ("image", "audio", "video")
# The attributes that the processors read of their tokenizer.
NAMED_TOKENS: Mapping[str, dict[str, str]] = {
    "qwen2_5_omni": {
        **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in _MEDIA},
        **{f"{part}_{end}_token": f"<|{part}_{end}|>" for part in ("vision", "audio") for end in ("bos", "eos")},
    },
    "qwen3_omni_moe": {
        **{f"{kind}_token": f"<|{kind}_pad|>" for kind in _MEDIA},
        **{
            f"{part}_{end}_token": f"<|{part}_{name}|>"
            for part in ("vision", "audio")
            for end, name in (("bos", "start"), ("eos", "end"))
        },
    },
}
_MEL_BINS = 128  # of the blank recording that mcore-bridge embeds
_AUDIO = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 64}
_SPEECH = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
_SPEECH_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


def omni_config(
    kind: str, text: dict[str, Any], vision: dict[str, Any], ids: Mapping[str, Any], audio: Mapping[str, Any] = _AUDIO
) -> Any:
    """Return the config of one of these types. `ids`: of tokens, by their names in NAMED_TOKENS, and of <|im_end|>."""
    hidden = text["hidden_size"]
    audio = {"num_mel_bins": _MEL_BINS, "output_dim": hidden, **audio}
    common = {"vision_start_token_id": ids["vision_bos_token"], "vision_end_token_id": ids["vision_eos_token"],
              "audio_start_token_id": ids["audio_bos_token"],
              "audio_end_token_id": ids["audio_eos_token"]}  # fmt: skip
    thinker = {"text_config": text, "vision_config": vision, "audio_config": audio, **common}
    if kind == "qwen2_5_omni":
        common |= {f"{media}_token_index": ids[f"{media}_token"] for media in _MEDIA}
        dit = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "emb_dim": 8,
               "num_embeds": 65, "mel_dim": 8, "enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [16, 16, 16, 16, 48],
               "enc_attention_channels": 8, "enc_res2net_scale": 2, "enc_se_channels": 8, "look_ahead_layers": [1],
               "look_backward_layers": [0]}  # fmt: skip
        vocoder = {"mel_dim": 8, "upsample_initial_channel": 16, "resblock_kernel_sizes": [3], "upsample_rates": [2, 2],
                   "resblock_dilation_sizes": [[1, 3, 5]], "upsample_kernel_sizes": [4, 4]}  # fmt: skip
        return AutoConfig.for_model(
            kind,
            thinker_config=thinker | common,
            talker_config=_SPEECH | {"embedding_size": hidden, "rope_parameters": _SPEECH_ROPE, **common},
            token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
        )
    common |= {f"{media}_token_id": ids[f"{media}_token"] for media in _MEDIA}
    thinker["audio_config"] = {"downsample_hidden_size": 8, **audio}
    # vLLM reads these two, which transformers does not have
    side = isqrt(vision["num_position_embeddings"]) * vision["patch_size"]
    thinker["vision_config"] = {"image_size": side, "apply_vit_abs_pos_embed": True, **vision}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16,
               "rope_parameters": _SPEECH_ROPE | {"mrope_interleaved": True}}  # fmt: skip
    talker = {"text_config": _SPEECH | experts, "code_predictor_config": _SPEECH | {"num_code_groups": 4},
              "num_code_groups": 4, "thinker_hidden_size": hidden, "accept_hidden_layer": 1, "spatial_merge_size": 2,
              "speaker_id": {"nobody": 1}}  # fmt: skip
    code2wav = {"codebook_size": 16, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
                "intermediate_size": 48, "num_hidden_layers": 1, "num_quantizers": 4, "upsample_rates": [2, 2],
                "upsampling_ratios": [2], "decoder_dim": 16}  # fmt: skip
    return AutoConfig.for_model(
        kind,
        thinker_config=thinker | common,
        talker_config=talker | common,
        code2wav_config=code2wav,
        im_end_token_id=ids["im_end"],
    )
