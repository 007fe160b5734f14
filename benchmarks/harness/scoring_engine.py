"""Start the plain vLLM that measures the accuracy of saved weights, on the GPU or CPU of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swift_megatron_grpo.platforms import cpu

if TYPE_CHECKING:
    from vllm import LLM

CACHE_BYTES = 2 << 30  # of vLLM; given, because its own measurement fails next to other processes


def scoring_engine(model: Path, dtype: str, max_model_len: int) -> LLM:
    """Return an engine whose weights may be replaced with `collective_rpc("reload_weights")`."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork cannot use CUDA after the next line has asked for it
    if not torch.cuda.is_available():
        cpu.activate()
    from vllm import LLM

    return LLM(
        str(model),
        dtype=dtype,
        max_model_len=max_model_len,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=CACHE_BYTES,
        enable_prefix_caching=False,  # the weights change
        enforce_eager=True,
        generation_config="vllm",
        seed=0,
    )
