"""Tiny random models with an image part, or with linear attention, as their released checkpoints are stored.

The model has the tokenizer of text.py with the tokens of its type for images, and a processor. Weights are in
bf16 and have the names of a released checkpoint; Qwen3.5 and Qwen3-Next have a multi-token prediction layer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from swift_megatron_grpo.cli.tiny_models.text import END_OF_TEXT, IM_END, Sizes, make_tokenizer

VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
GLM_ROLES = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM_VISION = [f"<|{name}_{kind}|>" for kind in ("image", "video") for name in ("begin_of", "end_of")]
GLM_PLACEHOLDERS = ["<|image|>", "<|video|>"]
INTERNVL_VISION = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 280  # 256 bytes, the added tokens and, as in real models, a few unused rows
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM_CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
INTERNVL_CHAT_TEMPLATE = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>"
)
TILE = 56  # pixels per side of a tile of InternVL
GLM = ("glm4v", "glm4v_moe")
WITH_DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
WITH_EXPERTS = ("qwen3_5_moe", "qwen3_next", "qwen3_vl_moe")
WITHOUT_HEAD_DIM = ("qwen2_vl", "qwen2_5_vl", "glm4v")  # a head has hidden / heads channels
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *WITH_DELTA_NETS, *GLM, "internvl")


@dataclass(frozen=True, slots=True)
class Processors:
    """Classes of transformers that a model's files name."""

    processor: str
    images: str
    videos: str


QWEN3_PROCESSORS = Processors("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
GLM_PROCESSORS = Processors("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor")
PROCESSORS = {
    "qwen2_vl": Processors("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": Processors("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "glm4v": GLM_PROCESSORS,
    "glm4v_moe": GLM_PROCESSORS,
    "internvl": Processors("InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its model_type, its sizes, and where it has full attention."""

    kind: str  # one of KINDS
    sizes: Sizes
    interval: int = 2  # of linear attention: every so many layers one has full attention
    tie: bool = False  # embedding and output layer share their weights


def tokenizer_for_images(kind: str) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer with the tokens of the processors and templates of this type."""
    if kind == "internvl":
        tokenizer = make_tokenizer(INTERNVL_VISION)
        tokenizer.add_tokens(PLAIN)
        tokenizer.chat_template = INTERNVL_CHAT_TEMPLATE
        tokenizer.model_max_length = 2048
        return tokenizer
    tokenizer = make_tokenizer()
    special = [*GLM_ROLES, *GLM_VISION, *GLM_PLACEHOLDERS] if kind in GLM else VISION
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(PLAIN)
    tokenizer.chat_template = GLM_CHAT_TEMPLATE if kind in GLM else CHAT_TEMPLATE
    tokenizer.model_max_length = 2048
    return tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.sizes.hidden,
        "intermediate_size": shape.sizes.intermediate,
        "num_hidden_layers": shape.sizes.layers,
        "num_attention_heads": shape.sizes.heads,
        "num_key_value_heads": shape.sizes.kv_heads,
        "max_position_embeddings": shape.sizes.positions,
        "tie_word_embeddings": shape.tie,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|user|>" if shape.kind in GLM else IM_END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    }
    if shape.kind not in WITHOUT_HEAD_DIM:
        config["head_dim"] = shape.sizes.head_dim
    if shape.kind == "internvl":
        return config | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if shape.kind in GLM:
        config["attention_bias"] = True
    if shape.kind == "glm4v_moe":
        config |= glm_experts_config(shape)
    if shape.kind in WITH_EXPERTS:
        config |= {
            "num_experts": shape.sizes.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": shape.sizes.expert_ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
    if shape.kind in WITH_DELTA_NETS:
        config |= delta_net_config(shape)
    return config | rope_config(shape)


def glm_experts_config(shape: Shape) -> dict[str, Any]:
    """Return a dense layer before the mixtures, a shared expert, and sigmoid scores."""
    return {
        "first_k_dense_replace": 1,
        "n_routed_experts": shape.sizes.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.sizes.expert_ffn,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": False,  # which vLLM reads, and transformers does not
    }


def delta_net_config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "full_attention_interval": shape.interval,
        "layer_types": [
            "linear_attention" if (layer + 1) % shape.interval else "full_attention"
            for layer in range(shape.sizes.layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.sizes.head_dim,
        "linear_value_head_dim": shape.sizes.head_dim,
        "linear_num_key_heads": shape.sizes.kv_heads,
        "linear_num_value_heads": 2 * shape.sizes.kv_heads,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
    }
    if shape.kind in WITH_EXPERTS:
        config["shared_expert_intermediate_size"] = shape.sizes.expert_ffn
    return config


def rope_config(shape: Shape) -> dict[str, Any]:
    share = 0.25 if shape.kind in WITH_DELTA_NETS else 0.5 if shape.kind in GLM else 1.0
    if shape.kind == "qwen3_next":
        return {"rope_theta": 10000.0, "partial_rotary_factor": share}
    frequencies = int(shape.sizes.head_dim * share) // 2
    side = frequencies * 3 // 8  # for height and for width; the rest is for time
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [frequencies - 2 * side, side, side]}
    if shape.kind.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    if share < 1:
        rope["partial_rotary_factor"] = share
    return {"rope_parameters": rope, **({"partial_rotary_factor": share} if share < 1 else {})}


def vision_config(shape: Shape) -> dict[str, Any]:
    if shape.kind == "internvl":
        return {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "attention_bias": True,
            "image_size": [TILE, TILE],
            "patch_size": [14, 14],
        }
    common = {"depth": 2, "num_heads": 2, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if shape.kind == "qwen2_vl":
        return {**common, "embed_dim": 32, "hidden_size": shape.sizes.hidden, "mlp_ratio": 2, "patch_size": 14}
    common |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": shape.sizes.hidden}
    if shape.kind == "qwen2_5_vl":
        return {**common, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    if shape.kind in GLM:
        return {**common, "patch_size": 14, "image_size": 8 * 14}
    deepstack = [0, 1] if shape.kind.startswith("qwen3_vl") else []
    return {**common, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}


def make_config(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Any:
    text = text_config(tokenizer, shape)
    if shape.kind == "qwen3_next":
        return AutoConfig.for_model(shape.kind, **text)
    return AutoConfig.for_model(
        shape.kind,
        text_config=text,
        vision_config=vision_config(shape),
        tie_word_embeddings=shape.tie,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in vision_tokens(shape.kind).items()},
    )


def vision_tokens(kind: str) -> dict[str, str]:
    """Return the tokens that a config.json has by number."""
    if kind == "internvl":
        return {"image_token_id": "<IMG_CONTEXT>"}
    if kind in GLM:
        ends = [f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end")]
        return dict(zip([*ends, "image_token_id", "video_token_id"], [*GLM_VISION, *GLM_PLACEHOLDERS], strict=True))
    return {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }


def draw_weights(model: torch.nn.Module, shape: Shape, seed: int) -> None:
    """Draw every weight by its name, away from the values at which an error would not show: no norm is 1, no bias 0."""
    std = 0.5 / math.sqrt(shape.sizes.hidden)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 2**32 + crc32(name.encode()))
        value = torch.empty(parameter.shape).normal_(0, 1, generator=generator)
        if name.endswith("A_log"):
            value = (4 + value).clamp(0.5, 8).log()
        elif name.endswith(("dt_bias", "conv1d.weight")):
            value = 0.4 * value
        elif name.rpartition(".")[2].startswith("lambda_"):
            value = 1 + 0.1 * value
        elif "norm" in name.rsplit(".", 2)[-2] and name.endswith("weight"):
            about_zero = shape.kind in WITH_DELTA_NETS and ".visual." not in name and "linear_attn" not in name
            value = 0.1 * value + (0 if about_zero else 1)  # these norms multiply by 1 + weight
        else:
            value = value * (std if parameter.ndim > 1 else 0.02)
        parameter.data.copy_(value)


def save_stacked_experts(model: PreTrainedModel, file: Path, transposed: bool) -> None:
    """Save all experts of a layer in one tensor, as released; save_pretrained splits or turns them.

    `transposed`: [experts, inputs, outputs], the order of Qwen3-VL.
    """
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if transposed and ".mlp.experts." in name]:
        tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def add_prediction_layer(folder: Path, layers: int, hidden: int) -> None:
    """Add a multi-token prediction layer, which transformers leaves out: copies of the last layer's rows, reversed."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = f"layers.{layers - 1}."
    for name in [name for name in tensors if f".{last}" in name and ".visual." not in name]:
        tensors["mtp.layers.0." + name.partition(last)[2]] = tensors[name].flip(0).contiguous()
    tensors["mtp.fc.weight"] = torch.full((hidden, 2 * hidden), 0.01, dtype=torch.bfloat16)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"] = torch.full((hidden,), 0.1, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_processor(folder: Path, kind: str) -> None:
    """Write the files of the image and video processors, for images of up to 128 x 128 pixels."""
    classes = PROCESSORS.get(kind, QWEN3_PROCESSORS)
    if kind == "internvl":
        write_processor_of_tiles(folder, classes)
        return
    common = {
        "patch_size": 16 if classes is QWEN3_PROCESSORS else 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": classes.processor,
    }
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    if kind in GLM:  # whose processor counts the pixels of the two frames that an image is for it
        size = {edge: 2 * pixels for edge, pixels in size.items()}
    files = {
        "preprocessor_config.json": {**common, "size": size, "image_processor_type": classes.images},
        "video_preprocessor_config.json": {**common, "size": size, "video_processor_type": classes.videos},
        "chat_template.json": {"chat_template": GLM_CHAT_TEMPLATE if kind in GLM else CHAT_TEMPLATE},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def write_processor_of_tiles(folder: Path, classes: Processors) -> None:
    """Write the files of processors that cut an image into up to four tiles."""
    common = {
        "size": {"height": TILE, "width": TILE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": classes.processor,
    }
    tiles = {"min_patches": 1, "max_patches": 4, "image_processor_type": classes.images}
    files = {
        "preprocessor_config.json": {**common, **tiles},
        "video_preprocessor_config.json": {**common, "video_processor_type": classes.videos},
        "processor_config.json": {"processor_class": classes.processor, "image_seq_length": (TILE // 28) ** 2},
        "chat_template.json": {"chat_template": INTERNVL_CHAT_TEMPLATE},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def save_composite(folder: Path, shape: Shape, seed: int = 0) -> PreTrainedModel:
    """Write a model with random weights, its tokenizer and its processor."""
    tokenizer = tokenizer_for_images(shape.kind)
    auto = AutoModelForCausalLM if shape.kind == "qwen3_next" else AutoModelForImageTextToText
    model: PreTrainedModel = auto.from_config(make_config(tokenizer, shape))
    draw_weights(model, shape, seed)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    if shape.kind in ("qwen3_5_moe", "qwen3_vl_moe"):
        save_stacked_experts(model, folder / "model.safetensors", transposed=shape.kind == "qwen3_vl_moe")
    if shape.kind != "qwen3_next":
        write_processor(folder, shape.kind)
    if shape.kind in WITH_DELTA_NETS:
        add_prediction_layer(folder, shape.sizes.layers, shape.sizes.hidden)
    return model
