"""Megatron with one rank in the test's own process, and a tiny policy of random weights that it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from mcore_bridge import GPTBridge, ModelConfig, get_mcore_model, hf_to_mcore_config
from mcore_bridge.model import GPTModel
from megatron.core import mpu, tensor_parallel
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCABULARY = 64


@contextmanager
def megatron_on_one_rank() -> Iterator[None]:
    """Set up Megatron's process groups inside the context."""
    angles = dict(ROPE_INIT_FUNCTIONS)  # mcore-bridge adds its own when it builds a model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
        ROPE_INIT_FUNCTIONS.clear()
        ROPE_INIT_FUNCTIONS.update(angles)
        gc.freeze()  # a process that a later test forks must not collect these groups, whose threads it lacks


@dataclass(frozen=True)
class TinyPolicy:
    """The same weights in transformers, in fp32, and in Megatron."""

    transformers: Qwen3ForCausalLM
    megatron: GPTModel
    bridge: GPTBridge


def tiny_policy(folder: Path) -> TinyPolicy:
    """Return a Qwen3 of two layers; its checkpoint is written to the folder."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    stock = Qwen3ForCausalLM(shape).eval()
    stock.save_pretrained(folder)
    settings = hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    config = ModelConfig(**settings, params_dtype=torch.float32)
    models = get_mcore_model(config)
    config.bridge.load_weights(models, str(folder))
    return TinyPolicy(stock, models[0], config.bridge)
