"""Loads a LoRA adapter from tensors into vLLM, which reads adapters from files; for colocate and for servers.

vLLM silently ignores tensors that belong to none of its modules, so an adapter with wrong names would have no effect.
"""

from typing import Any

import torch
from swift.rlhf_trainers import utils as swift_utils


def load_adapter(worker: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    swift_utils.patch_vllm_load_adapter()  # lets vLLM load an adapter from tensors; repeated calls have no effect
    request = swift_utils.TensorLoRARequest(
        lora_name=swift_utils.VLLM_LORA_NAME, lora_int_id=swift_utils.VLLM_LORA_INT_ID,
        lora_path=swift_utils.VLLM_LORA_PATH, peft_config=config, lora_tensors=tensors, load_inplace=True,
    )  # fmt: skip
    worker.add_lora(request)
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter = manager.get_adapter(swift_utils.VLLM_LORA_INT_ID)
    unknown = sorted(set(adapter.loras) - set(manager.modules))
    if unknown or not adapter.loras:
        raise RuntimeError(
            f"vLLM would ignore {len(unknown)} of the {len(adapter.loras)} modules of the adapter, because it has no "
            f"modules of these names: {', '.join(unknown[:5]) or 'the adapter has no tensors'}; vLLM's modules have "
            f"names like {next(iter(manager.modules), 'nothing')}. Use --vllm_enable_lora false, which merges the "
            "adapter into the weights"
        )
