"""A LoRA adapter as tensors into vLLM, which knows adapters as files: for engines in this process and for servers.

vLLM is silent about tensors that belong to none of its modules, so an adapter under wrong names would change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from swift.rlhf_trainers.utils import (
    VLLM_LORA_INT_ID,
    VLLM_LORA_NAME,
    VLLM_LORA_PATH,
    TensorLoRARequest,
    patch_vllm_load_adapter,
)


def load_adapter(worker: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> int:
    """In the place of the one before, by the worker that holds the model. Returns how many modules it changes."""
    patch_vllm_load_adapter()  # makes vLLM take the tensors; once is enough, more do nothing
    request = TensorLoRARequest(
        lora_name=VLLM_LORA_NAME,
        lora_int_id=VLLM_LORA_INT_ID,
        lora_path=VLLM_LORA_PATH,
        peft_config=config,
        lora_tensors=tensors,
        load_inplace=True,
    )
    worker.add_lora(request)
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter = manager.get_adapter(VLLM_LORA_INT_ID)
    homeless = sorted(set(adapter.loras) - set(manager.modules))
    if homeless or not adapter.loras:
        raise RuntimeError(
            f"{len(homeless)} of the {len(adapter.loras)} modules of the adapter are none of vLLM's, which would leave "
            f"them out: {', '.join(homeless[:5]) or 'it has no tensors'}; vLLM's are named like "
            f"{next(iter(manager.modules), 'nothing')}. Use --vllm_enable_lora false, which merges the adapter"
        )
    return len(adapter.loras)
