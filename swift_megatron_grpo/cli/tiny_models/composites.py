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

from swift_megatron_grpo.cli.tiny_models.text import (
    Sizes,
    expert_values,
    make_tokenizer,
    shared_expert_values,
    text_values,
)

PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 280  # 256 bytes, the added tokens and, as in real models, a few unused rows


def chat_template(before: str, turn: str, image: str, video: str, end: str, answer: str) -> str:
    """Return a template of conversations, whose messages are texts or lists of parts."""
    return (
        before + "{% for message in messages %}" + turn + "{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + image + "{% elif part['type'] == 'video' %}" + video + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + answer + "{% endif %}"
    )


@dataclass(frozen=True, slots=True)
class Family:
    """The tokens of types whose tokenizers are alike."""

    special: list[str]
    ids: dict[str, str]  # tokens that config.json has by number, by their names there
    chat_template: str
    named: dict[str, str] | None = None  # tokens that are attributes of the tokenizer, by the name of the attribute


IM_TURN = "<|im_start|>{{ message['role'] }}\n", "<|im_end|>\n", "<|im_start|>assistant\n"
QWEN = Family(
    special=["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"],
    ids={
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    chat_template=chat_template("", IM_TURN[0], "<|vision_start|><|image_pad|><|vision_end|>",
                                "<|vision_start|><|video_pad|><|vision_end|>", *IM_TURN[1:]),
)  # fmt: skip
GLM_IDS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
GLM_FAMILY = Family(
    special=["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *GLM_IDS.values()],
    ids=GLM_IDS,
    chat_template=chat_template("[gMASK]<sop>", "<|{{ message['role'] }}|>\n",
                                "<|begin_of_image|><|image|><|end_of_image|>",
                                "<|begin_of_video|><|video|><|end_of_video|>", "", "<|assistant|>\n"),
)  # fmt: skip
INTERNVL = Family(
    special=[],
    ids={"image_token_id": "<IMG_CONTEXT>"},
    chat_template=chat_template("", IM_TURN[0], "<IMG_CONTEXT>", "<video>", *IM_TURN[1:]),
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
TILE = 56  # pixels per side of a tile of InternVL
GLM = ("glm4v", "glm4v_moe")
WITH_DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
WITH_EXPERTS = ("qwen3_5_moe", "qwen3_next", "qwen3_vl_moe")
WITHOUT_HEAD_DIM = ("qwen2_vl", "qwen2_5_vl", "glm4v")  # a head has hidden / heads channels
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *WITH_DELTA_NETS, *GLM, "internvl")

FAMILIES = {**dict.fromkeys(KINDS, QWEN), **dict.fromkeys(GLM, GLM_FAMILY), "internvl": INTERNVL}
# Beginnings of the names of three classes of transformers: the processor, and those of images and of videos in it.
PROCESSORS = {
    **dict.fromkeys(KINDS, ("Qwen3VL", "Qwen2VL", "Qwen3VL")),
    "qwen2_vl": ("Qwen2VL", "Qwen2VL", "Qwen2VL"),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VL", "Qwen2VL"),
    **dict.fromkeys(GLM, ("Glm4v", "Glm4v", "Glm4v")),
    "internvl": ("InternVL", "GotOcr2", "InternVL"),
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
    family = FAMILIES[kind]
    tokenizer = make_tokenizer(family.named)
    if family.special:
        tokenizer.add_special_tokens({"additional_special_tokens": family.special})
    tokenizer.add_tokens(PLAIN)
    tokenizer.chat_template = family.chat_template
    tokenizer.model_max_length = 2048
    return tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> dict[str, Any]:
    config = text_values(shape.sizes) | {"vocab_size": VOCABULARY, "tie_word_embeddings": shape.tie}
    if shape.kind in WITHOUT_HEAD_DIM:
        del config["head_dim"]
    if shape.kind == "internvl":
        return config | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if shape.kind in GLM:
        config |= {"attention_bias": True, "eos_token_id": tokenizer.convert_tokens_to_ids("<|user|>")}
    if shape.kind == "glm4v_moe":
        config |= shared_expert_values(shape.sizes, 1.5)
        config["use_qk_norm"] = False  # which vLLM reads, and transformers does not
    if shape.kind in WITH_EXPERTS:
        config |= expert_values(shape.sizes)
    if shape.kind in WITH_DELTA_NETS:
        config |= delta_net_config(shape)
    return config | rope_config(shape)


def delta_net_config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "full_attention_interval": shape.interval,
        "layer_types": [
            "linear_attention" if (layer + 1) % shape.interval else "full_attention"
            for layer in range(shape.sizes.layers)
        ],
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
        }
    common = {"depth": 2, "num_heads": 2}
    if shape.kind == "qwen2_vl":
        return {**common, "embed_dim": 32, "hidden_size": shape.sizes.hidden, "mlp_ratio": 2}
    common |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": shape.sizes.hidden}
    if shape.kind == "qwen2_5_vl":
        return {**common, "window_size": 56, "fullatt_block_indexes": [1]}
    if shape.kind in GLM:
        return {**common, "image_size": 8 * 14}
    deepstack = [0, 1] if shape.kind.startswith("qwen3_vl") else []
    return {**common, "num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}


def make_config(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Any:
    text = text_config(tokenizer, shape)
    if shape.kind == "qwen3_next":
        return AutoConfig.for_model(shape.kind, **text)
    return AutoConfig.for_model(
        shape.kind,
        text_config=text,
        vision_config=vision_config(shape),
        tie_word_embeddings=shape.tie,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in FAMILIES[shape.kind].ids.items()},
    )


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
    """Write the files of the image and video processors, for images of up to 128 x 128 pixels, or of four tiles."""
    processor, images, videos = PROCESSORS[kind]
    common: dict[str, Any] = {"processor_class": f"{processor}Processor"}
    common |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    of_images: dict[str, Any] = {"image_processor_type": f"{images}ImageProcessor"}
    files: dict[str, dict[str, Any]] = {}
    if kind == "internvl":
        common["size"] = {"height": TILE, "width": TILE}
        of_images |= {"min_patches": 1, "max_patches": 4}
        shared = {"processor_class": common["processor_class"], "image_seq_length": (TILE // 28) ** 2}
        files["processor_config.json"] = shared
    else:
        frames = 2 if kind in GLM else 1  # GLM's processor counts the pixels of the two frames that an image is for it
        common["size"] = {"shortest_edge": frames * 32 * 32, "longest_edge": frames * 128 * 128}
        patch = 16 if processor == "Qwen3VL" else 14
        common |= {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    files |= {
        "preprocessor_config.json": common | of_images,
        "video_preprocessor_config.json": common | {"video_processor_type": f"{videos}VideoProcessor"},
        "chat_template.json": {"chat_template": FAMILIES[kind].chat_template},
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
