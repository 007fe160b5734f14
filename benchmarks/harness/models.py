"""Make a checkpoint of a shape of shapes.py with random weights; speed and memory do not depend on their values.

    python -m benchmarks.harness.models SHAPE FOLDER [--no-weights]

With --no-weights the folder has all but the weights, for trainers that draw them (instrument/random_weights.py).
Runs as a separate process, so that its GPU memory is freed when it exits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from swift.template.templates.utils import DEFAULT_SYSTEM
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from swift_megatron_grpo.cli.tiny_models import IM_END, make_tokenizer, tokenizer_for_images, write_processor
from swift_megatron_grpo.cli.tiny_omni import NAMED_TOKENS, omni_config
from swift_megatron_grpo.packing.flops import DeltaNets

from .chat import prompt_text
from .shapes import SHAPES, Shape
from .workload import IMAGE_TOKENS, TEMPLATE_TOKENS_FILE

WITH_SYSTEM_PROMPT = ("qwen2_5_vl",)  # templates with which ms-swift adds one


def make_checkpoint(folder: Path, shape: Shape, with_weights: bool = True) -> None:
    with random_weights() if with_weights else torch.device("meta"):
        tokenizer, model = make_model(shape)
    if with_weights:
        model.save_pretrained(folder)
    else:
        model.config.architectures = [type(model).__name__]  # save_pretrained of a model writes it as well
        model.config.save_pretrained(folder)
        save_file({}, folder / "model.safetensors")
    if shape.delta_nets is not None or shape.vision is not None:
        write_processor(folder, shape.model_type)
    tokenizer.save_pretrained(folder)
    (folder / TEMPLATE_TOKENS_FILE).write_text(str(count_template_tokens(tokenizer, shape.template)))


def make_model(shape: Shape) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    if shape.audio is not None:
        return make_qwen3_omni(shape)
    if shape.vision is not None:
        return make_qwen_vl(shape, shape.vision[1])
    if shape.delta_nets is not None:
        return make_qwen3_5(shape, shape.delta_nets)
    return make_qwen3(shape)


def text_sizes(tokenizer: PreTrainedTokenizerFast | None, shape: Shape) -> dict[str, Any]:
    """Return what config.json has for every kind of text model. `tokenizer`: None for the sizes alone.

    As in released Qwen3, there is no pad_token_id, for which transformers sets a row of the embedding to zero. RMSNorm
    amplifies the gradient of such a row a thousandfold wherever a random completion contains the token.
    """
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer and tokenizer.eos_token_id,
        "dtype": "bfloat16",
    }


def make_qwen3(shape: Shape) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return a dense Qwen3, or one whose layers have experts."""
    tokenizer = fill_vocabulary(make_tokenizer(), shape.vocabulary)
    values = {
        **text_sizes(tokenizer, shape),
        "rope_theta": 1e6,
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(qwen3_config(shape, values))
    return tokenizer, model


def qwen3_config(shape: Shape, values: dict[str, Any]) -> PretrainedConfig:
    """Return the config of a dense Qwen3, or of one whose layers have experts."""
    return AutoConfig.for_model(shape.model_type, **values, **expert_sizes(shape))


def expert_sizes(shape: Shape) -> dict[str, Any]:
    """Return what config.json has for experts in every layer; nothing for a dense model."""
    if not shape.experts:
        return {}
    sizes = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    return sizes | ({"shared_expert_intermediate_size": shape.shared_ffn} if shape.shared_ffn else {})


def make_qwen3_5(shape: Shape, nets: DeltaNets) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return a model with its image part, as released checkpoints have it."""
    tokenizer = fill_vocabulary(tokenizer_for_images(shape.model_type), shape.vocabulary)
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    config = qwen3_5_config(shape, nets, text_sizes(tokenizer, shape), tokens)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return tokenizer, model


def qwen3_5_config(shape: Shape, nets: DeltaNets, values: dict[str, Any], tokens: dict[str, int]) -> PretrainedConfig:
    """Return the config of a Qwen3.5. `tokens`: ids of those around images."""
    interval = shape.layers // (shape.layers - nets.layers)
    rotary = shape.head_dim // 8  # pairs of channels, of a quarter of the head
    side = rotary * 3 // 8  # for height and for width; the rest is for time
    text = {
        **values,
        **expert_sizes(shape),
        "full_attention_interval": interval,
        "layer_types": ["full_attention" if layer % interval == 0 else "linear_attention"
                        for layer in range(1, shape.layers + 1)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": nets.linear_key_head_dim,
        "linear_value_head_dim": nets.linear_value_head_dim,
        "linear_num_key_heads": nets.linear_num_key_heads,
        "linear_num_value_heads": nets.linear_num_value_heads,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [rotary - 2 * side, side, side]},
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    width = 64 * max(1, shape.hidden // 128)
    vision = {"depth": shape.vision_layers, "hidden_size": width, "intermediate_size": 4 * width,
              "num_heads": max(2, width // 64), "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": shape.hidden,
              "deepstack_visual_indexes": []}  # fmt: skip
    return AutoConfig.for_model(
        shape.model_type,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
        **tokens,
    )


def make_qwen_vl(shape: Shape, vision: dict[str, Any]) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return a Qwen2.5-VL or Qwen3-VL."""
    tokenizer = fill_vocabulary(tokenizer_for_images(shape.model_type), shape.vocabulary)
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    config = qwen_vl_config(shape, vision, text_sizes(tokenizer, shape), tokens)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return tokenizer, model


def qwen_vl_config(
    shape: Shape, vision: dict[str, Any], text: dict[str, Any], tokens: dict[str, int]
) -> PretrainedConfig:
    """Return the config of a Qwen2.5-VL or Qwen3-VL. `tokens`: ids of those around images."""
    side = shape.head_dim // 2 * 3 // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [shape.head_dim // 2 - 2 * side, side, side]}
    if shape.model_type == "qwen3_vl":
        rope["mrope_interleaved"] = True
    return AutoConfig.for_model(
        shape.model_type,
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": shape.hidden},
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
        **tokens,
    )


def make_qwen3_omni(shape: Shape) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    named = NAMED_TOKENS[shape.model_type]
    tokenizer = fill_vocabulary(tokenizer_for_images(shape.model_type), shape.vocabulary, named)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in {**named, "im_end": IM_END}.items()}
    config = qwen3_omni_config(shape, text_sizes(tokenizer, shape), ids)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config)
    return tokenizer, model


def qwen3_omni_config(shape: Shape, values: dict[str, Any], ids: Mapping[str, int | None]) -> PretrainedConfig:
    """Return the config of a Qwen3-Omni. `ids`: of tokens, by their names in NAMED_TOKENS, and of <|im_end|>."""
    assert shape.vision is not None and shape.audio is not None
    side = shape.head_dim // 2 * 3 // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [shape.head_dim // 2 - 2 * side, side, side],
            "mrope_interleaved": True}  # fmt: skip
    text = {**values, **expert_sizes(shape), "rope_parameters": rope}
    vision = {**shape.vision[1], "out_hidden_size": shape.hidden}
    config: PretrainedConfig = omni_config(shape.model_type, text, vision, ids, shape.audio)
    return config


@contextmanager
def random_weights() -> Iterator[None]:
    """Draw weights in bf16, on the GPU if there is one: they are billions of random numbers."""
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            yield
    finally:
        torch.set_default_dtype(usual)


def fill_vocabulary(
    tokenizer: PreTrainedTokenizerFast, vocabulary: int, named: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Add a text for every token id of the vocabulary: a random model samples all of them, and vLLM decodes them.

    `named`: special tokens that are attributes of the tokenizer, by the name of the attribute.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    texts = {number: f"<{number}>" for number in range(len(tokenizer), vocabulary)}
    texts |= {token["id"]: token["content"] for token in state["added_tokens"]}  # otherwise they move to the end
    state["model"]["vocab"] |= {text: number for number, text in texts.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )


def count_template_tokens(tokenizer: PreTrainedTokenizerFast, template: str) -> int:
    """Return the number of tokens that ms-swift's template adds to a user's turn."""
    text = prompt_text(tokenizer, template, "x", DEFAULT_SYSTEM if template in WITH_SYSTEM_PROMPT else None)
    return len(tokenizer(text).input_ids) - 1


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[2]), SHAPES[sys.argv[1]], with_weights="--no-weights" not in sys.argv[3:])
