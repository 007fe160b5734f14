"""Tiny random models by the type that transformers gives them, and the config.json of a large one.

All have a byte-level tokenizer. `TEXT_CONFIGS` has one entry for each type of text model. The others are composites:
with an image part or with linear attention, as their released checkpoints are stored. Their tokenizer has the tokens of
their type for images, and they have a processor. Weights are in bf16 and have the names of a released checkpoint;
Qwen3.5 and Qwen3-Next have a multi-token prediction layer.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)
from transformers.models.auto import modeling_auto as auto

from swift_megatron_grpo.arguments.refused import OMNI
from swift_megatron_grpo.cli.tiny_omni import NAMED_TOKENS, omni_config

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
        "vocab_size": VOCABULARY, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "max_position_embeddings": sizes.positions, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def expert_values(sizes: Sizes) -> Values:
    return {
        "num_experts": sizes.experts, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.expert_ffn,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.0,
    }  # fmt: skip


def shared_expert_values(sizes: Sizes, scale: float) -> Values:
    """Return a dense layer before the mixtures, a shared expert, and sigmoid scores that are scaled."""
    return {
        "first_k_dense_replace": 1, "n_routed_experts": sizes.experts, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_ffn, "norm_topk_prob": True, "routed_scaling_factor": scale,
    }  # fmt: skip


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


# ---- composites

PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY_OF_COMPOSITES = 280  # 256 bytes, the added tokens and, as in real models, a few unused rows


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
    "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>", "video_token_id": "<|video|>",
}  # fmt: skip
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
OMNI_FAMILIES = {
    kind: Family(
        special=[],
        ids={},
        chat_template=chat_template("", IM_TURN[0], f"{named['vision_bos_token']}{named['image_token']}"
                                    f"{named['vision_eos_token']}", "<video>", *IM_TURN[1:]),
        named=named,
    )
    for kind, named in NAMED_TOKENS.items()
}  # fmt: skip
MINICPM = Family(
    special=[],
    ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    chat_template=chat_template("", IM_TURN[0], "<|image_pad|>", "<|video_pad|>", *IM_TURN[1:]),
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        **{
            f"{part}_{end}_token": f"<{slash}{part}>"
            for part in ("image", "slice", "image_id")
            for end, slash in (("start", ""), ("end", "/"))
        },
    },
)
TILE = 56  # pixels per side of a tile of InternVL
GLM = ("glm4v", "glm4v_moe")
WITH_DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "minicpmv4_6")
SEEING = re.compile(r"\.(visual|vision_tower|merger)\.")  # in the names of image parts of these types
WITH_EXPERTS = ("qwen3_5_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_omni_moe")
WITHOUT_HEAD_DIM = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v")  # a head has hidden / heads channels
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *WITH_DELTA_NETS, *GLM, *OMNI, "internvl")
TYPES = (*TEXT_CONFIGS, *KINDS)

FAMILIES = {**dict.fromkeys(KINDS, QWEN), **dict.fromkeys(GLM, GLM_FAMILY), **OMNI_FAMILIES, "internvl": INTERNVL,
            "minicpmv4_6": MINICPM}  # fmt: skip
# Beginnings of the names of three classes of transformers: the processor, and those of images and of videos in it.
PROCESSORS = {
    **dict.fromkeys(KINDS, ("Qwen3VL", "Qwen2VL", "Qwen3VL")),
    "qwen2_vl": ("Qwen2VL", "Qwen2VL", "Qwen2VL"),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VL", "Qwen2VL"),
    "qwen2_5_omni": ("Qwen2_5Omni", "Qwen2VL", "Qwen2VL"),
    "qwen3_omni_moe": ("Qwen3OmniMoe", "Qwen2VL", "Qwen2VL"),
    **dict.fromkeys(GLM, ("Glm4v", "Glm4v", "Glm4v")),
    "internvl": ("InternVL", "GotOcr2", "InternVL"),
    "minicpmv4_6": ("MiniCPMV4_6",) * 3,
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
    config = text_values(shape.sizes) | {"vocab_size": VOCABULARY_OF_COMPOSITES, "tie_word_embeddings": shape.tie}
    if shape.kind in WITHOUT_HEAD_DIM:
        del config["head_dim"]
    if shape.kind == "internvl":
        return config | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if shape.kind == "minicpmv4_6":
        config["model_type"] = "qwen3_5_text"
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
    if shape.kind.startswith("qwen3") or shape.kind in WITH_DELTA_NETS:
        rope["mrope_interleaved"] = True
    if share < 1:
        rope["partial_rotary_factor"] = share
    return {"rope_parameters": rope, **({"partial_rotary_factor": share} if share < 1 else {})}


def vision_config(shape: Shape) -> dict[str, Any]:
    if shape.kind == "internvl":
        return {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "attention_bias": True, "image_size": [TILE, TILE],
        }  # fmt: skip
    if shape.kind == "minicpmv4_6":
        return {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
                "image_size": 8 * 14, "patch_size": 14}  # fmt: skip
    common = {"depth": 2, "num_heads": 2}
    if shape.kind == "qwen2_vl":
        return {**common, "embed_dim": 32, "hidden_size": shape.sizes.hidden, "mlp_ratio": 2}
    common |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": shape.sizes.hidden}
    if shape.kind in ("qwen2_5_vl", "qwen2_5_omni"):
        return {**common, "window_size": 56, "fullatt_block_indexes": [1]}
    if shape.kind in GLM:
        return {**common, "image_size": 8 * 14}
    deepstack = [0, 1] if shape.kind.startswith(("qwen3_vl", "qwen3_omni")) else []
    return {**common, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}


def make_config(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Any:
    text = text_config(tokenizer, shape)
    if shape.kind == "qwen3_next":
        return AutoConfig.for_model(shape.kind, **text)
    if shape.kind in OMNI:
        numbers = {name: tokenizer.convert_tokens_to_ids(token) for name, token in NAMED_TOKENS[shape.kind].items()}
        numbers["im_end"] = tokenizer.convert_tokens_to_ids(IM_END)
        return omni_config(shape.kind, text, vision_config(shape), numbers)
    between = {"insert_layer_id": 1} if shape.kind == "minicpmv4_6" else {}  # layers before patches are merged
    return AutoConfig.for_model(
        shape.kind,
        **between,
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
        elif name.endswith("weight") and _is_norm(name.rsplit(".", 2)[-2]):
            about_zero = shape.kind in WITH_DELTA_NETS and not SEEING.search(name) and "linear_attn" not in name
            value = 0.1 * value + (0 if about_zero else 1)  # these norms multiply by 1 + weight
        elif ".conv2d" in name and parameter.ndim > 1:
            value = value / math.sqrt(math.prod(parameter.shape[1:]))  # three in a row, each with few inputs
        else:
            value = value * (std if parameter.ndim > 1 else 0.02)
        parameter.data.copy_(value)


def _is_norm(module: str) -> bool:
    """Return True for the name of a norm. ln_post and ln_q are those of audio parts, and of aligners."""
    return "norm" in module or module.startswith("ln_")


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
    elif kind == "minicpmv4_6":
        common |= {"scale_resolution": 112, "patch_size": 14, "max_slice_nums": 4}
    else:
        frames = 2 if kind in GLM else 1  # GLM's processor counts the pixels of the two frames that an image is for it
        common["size"] = {"shortest_edge": frames * 32 * 32, "longest_edge": frames * 128 * 128}
        patch = 16 if processor in ("Qwen3VL", "Qwen3OmniMoe") else 14
        common |= {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    files |= {
        "preprocessor_config.json": common | of_images,
        "video_preprocessor_config.json": common | {"video_processor_type": f"{videos}VideoProcessor"},
        "chat_template.json": {"chat_template": FAMILIES[kind].chat_template},
    }
    if kind in OMNI:  # in the same file as the processor of images
        files["preprocessor_config.json"] |= WhisperFeatureExtractor(feature_size=128).to_dict()
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def save_composite(folder: Path, shape: Shape, seed: int = 0) -> PreTrainedModel:
    """Write a model with random weights, its tokenizer and its processor."""
    tokenizer = tokenizer_for_images(shape.kind)
    factories = dict.fromkeys(OMNI, AutoModelForMultimodalLM) | {"qwen3_next": AutoModelForCausalLM}
    factory = factories.get(shape.kind, AutoModelForImageTextToText)
    model: PreTrainedModel = factory.from_config(make_config(tokenizer, shape))
    draw_weights(model, shape, seed)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    if shape.kind in ("qwen3_5_moe", "qwen3_vl_moe"):
        save_stacked_experts(model, folder / "model.safetensors", transposed=shape.kind == "qwen3_vl_moe")
    if shape.kind != "qwen3_next":
        write_processor(folder, shape.kind)
    if shape.kind == "qwen2_5_omni":
        torch.save({"nobody": {}}, folder / "spk_dict.pt")  # its speakers, which transformers reads with the weights
    if shape.kind in WITH_DELTA_NETS and shape.kind != "minicpmv4_6":
        add_prediction_layer(folder, shape.sizes.layers, shape.sizes.hidden)
    return model


def model_type_of(architecture: str) -> str | None:
    """Return the model_type of a class of transformers such as Qwen3ForCausalLM; None if it is unknown."""
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
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
