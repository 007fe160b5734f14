"""Sizes of a model, from its config.json alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto as auto

from swift_megatron_grpo.arguments.refused import OMNI, TAKES_RECORDINGS
from swift_megatron_grpo.cli.estimate.activations import Decoder, VisionTower
from swift_megatron_grpo.cli.estimate.audio_part import AudioPart
from swift_megatron_grpo.cli.estimate.parameters import Part, Tensor, tensors_of
from swift_megatron_grpo.generation.protocol.model_identity import language_config, media_config, read_model_config
from swift_megatron_grpo.packing.flops import DeltaNets, FlopsModel
from swift_megatron_grpo.settings.layout import why_repeated

# Tensors that the feed-forward of a vision tower saves: outputs of its first matrix and activation, and their product.
_FEED_FORWARD = {"qwen2_vl": 3, "qwen2_5_vl": 4, "qwen3_vl": 2, "qwen3_vl_moe": 2, "qwen3_5": 2, "qwen3_5_moe": 2,
                 "glm4v": 4, "glm4v_moe": 4, "internvl": 2, "qwen3_omni_moe": 2}  # fmt: skip
_WITH_CONVOLUTION = ("glm4v", "glm4v_moe")  # whose blocks have a feed-forward as wide as a row


@dataclass(frozen=True)
class Model:
    """Sizes of a model that the estimates need."""

    name: str
    tensors: list[Tensor]
    decoder: Decoder
    flops: FlopsModel
    cached: int  # channels of a token in the cache of vLLM, of all layers
    key_heads: int  # that vLLM's ranks can divide
    repeats_prompts: bool  # has attention that cannot share a prompt: docs/shared_prompts.md
    vision_tower: VisionTower | None = None  # None: takes no images, or is of a kind that cannot be trained on them
    audio_part: AudioPart | None = None  # the same, of recordings

    @property
    def parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    def bytes_in_vllm(self, item: int, eight_bits: bool) -> int:
        """Return the bytes of all weights; with `eight_bits` a number of a matrix in a layer has one."""
        matrices = sum(tensor.size for tensor in self.tensors if tensor.layer is not None and len(tensor.shape) > 1)
        return self.parameters * item - (matrices * (item - 1) if eight_bits else 0)


def read_model(folder: str | Path) -> Model:
    """Read the sizes. Raises ValueError if transformers cannot build the model."""
    config = read_model_config(folder)
    text = language_config(config)
    tensors = tensors_of(shapes_of(folder))
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    decoder, media = decoder_of(text, tied, tensors), media_config(config)
    return Model(
        name=str((config.get("architectures") or [config.get("model_type")])[0]),
        tensors=tensors,
        decoder=decoder,
        flops=flops_of(text, decoder),
        cached=cached_channels(text, decoder),
        key_heads=1 if "kv_lora_rank" in text else text.get("num_key_value_heads") or text["num_attention_heads"],
        repeats_prompts=why_repeated(text) is not None,
        vision_tower=vision_tower_of(config["model_type"], media.get("vision_config") or {}, decoder.hidden),
        audio_part=audio_part_of(config["model_type"], media.get("audio_config") or {}, decoder.hidden),
    )


def shapes_of(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all parameters, which are not allocated. Raises ValueError for unknown classes."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type in OMNI:  # the other parts are never built
        config = config.thinker_config
    sees_images = config.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not sees_images and config.model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"transformers has no model class for {config.model_type}: memory cannot be estimated")
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if sees_images else AutoModelForCausalLM).from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def decoder_of(text: Mapping[str, Any], tied: bool, tensors: Sequence[Tensor]) -> Decoder:
    """Return the sizes in the config of a language model, under the names that transformers uses."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head, latent = text.get("head_dim") or hidden // heads, "kv_lora_rank" in text
    queries, keys = heads * head, (text.get("num_key_value_heads") or heads) * head
    if latent:  # multi-latent attention: keys of all heads exist for the kernel
        queries = keys = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = enumerate(text.get("layer_types") or ())
    expert_ffn = text.get("moe_intermediate_size") or text.get("intermediate_size", 0)
    number_shared = _first(text, "n_shared_experts", "moe_num_shared_experts") or 0
    shared = text.get("shared_expert_intermediate_size") or number_shared * expert_ffn
    return Decoder(
        layers=text["num_hidden_layers"],
        hidden=hidden,
        queries=queries,
        keys=keys,
        ffn=text.get("intermediate_size") or 0,
        vocabulary=text["vocab_size"],
        tied=tied,
        normed_heads=latent or any(".self_attn.q_norm." in tensor.name for tensor in tensors),
        rotary=2 * sum(rotary.get("mrope_section") or ()),
        experts=_first(text, "num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts") or 0,
        expert_layers=frozenset(
            tensor.layer for tensor in tensors if tensor.part is Part.EXPERTS and tensor.layer is not None
        ),
        expert_ffn=expert_ffn,
        experts_per_token=_first(text, "num_experts_per_tok", "moe_topk", "moe_k", "top_k") or 0,
        shared_ffn=shared,
        delta_layers=frozenset(layer for layer, kind in kinds if kind == "linear_attention"),
        delta_keys=text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0),
        delta_values=text.get("linear_num_value_heads", 0) * text.get("linear_value_head_dim", 0),
    )


def vision_tower_of(model_type: str, vision: Mapping[str, Any], rows: int) -> VisionTower | None:
    """Return the sizes in the vision_config of a model whose images can be trained on. `rows`: channels of a row."""
    if model_type not in _FEED_FORWARD:
        return None
    # config.json need not have what is as in the class.
    nested = {"vision_config": dict(vision)}
    if model_type in OMNI:
        config = AutoConfig.for_model(model_type, thinker_config=nested).thinker_config
    else:
        config = AutoConfig.for_model(model_type, **nested)
    sizes = config.vision_config.to_dict()
    oldest, convolves, tiles = model_type == "qwen2_vl", model_type in _WITH_CONVOLUTION, model_type == "internvl"
    hidden = sizes["embed_dim" if oldest else "hidden_size"]
    pixels = prod(sizes["patch_size"]) if tiles else sizes["temporal_patch_size"] * sizes["patch_size"] ** 2
    return VisionTower(
        layers=sizes["num_hidden_layers" if tiles else "depth"],
        hidden=hidden,
        ffn=int(hidden * sizes["mlp_ratio"]) if oldest else rows if convolves else sizes["intermediate_size"],
        feed_forward=_FEED_FORWARD[model_type],
        rms_norms=sizes["norm_type"] == "rms_norm" if tiles else model_type == "qwen2_5_vl" or convolves,
        values=sizes["num_channels" if tiles else "in_channels"] * pixels,
        rows=rows,
        deepstack=len(sizes.get("deepstack_visual_indexes") or ()),
        aligner_ffn=sizes["intermediate_size"] if convolves else 0,
        shuffles=tiles,
    )


def audio_part_of(model_type: str, audio: Mapping[str, Any], rows: int) -> AudioPart | None:
    """Return the sizes in the audio_config of a model that takes recordings. `rows`: channels of a row."""
    if model_type not in TAKES_RECORDINGS:
        return None
    config = AutoConfig.for_model(model_type, thinker_config={"audio_config": dict(audio)})
    sizes = config.thinker_config.audio_config
    return AudioPart(
        layers=sizes.encoder_layers,
        hidden=sizes.d_model,
        ffn=sizes.encoder_ffn_dim,
        bins=sizes.num_mel_bins,
        channels=sizes.downsample_hidden_size,
        rows=rows,
    )


def cached_channels(text: Mapping[str, Any], decoder: Decoder) -> int:
    """Return the channels that the cache has for a token: keys and values, or the latent of multi-latent attention."""
    of_layer = 2 * decoder.keys
    if "kv_lora_rank" in text:
        of_layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    return int(of_layer * (decoder.layers - len(decoder.delta_layers)))


def flops_of(text: Mapping[str, Any], decoder: Decoder) -> FlopsModel:
    """Return the FLOPs of a sequence; of a mixture of experts, those of the experts that a token takes."""
    heads, nets = text["num_attention_heads"], None
    if decoder.delta_layers:
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        nets = DeltaNets(len(decoder.delta_layers), *(text[name] for name in names))
    head = decoder.queries // heads
    return FlopsModel.of_transformer(
        num_layers=decoder.layers, hidden_size=decoder.hidden, ffn_hidden_size=decoder.ffn, num_attention_heads=heads,
        vocab_size=decoder.vocabulary, num_query_groups=decoder.keys // head, kv_channels=head, delta_nets=nets,
        expert_layers=len(decoder.expert_layers),
        experts_width=decoder.experts_per_token * decoder.expert_ffn + decoder.shared_ffn,
    )  # fmt: skip


def _first(text: Mapping[str, Any], *names: str) -> int | None:
    return next((text[name] for name in names if isinstance(text.get(name), int)), None)
