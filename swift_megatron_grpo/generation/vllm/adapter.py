"""Loads a LoRA adapter from tensors into vLLM, which reads adapters from files; for colocate and for servers.

vLLM silently ignores tensors that belong to none of its modules, so an adapter with wrong names would have no effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from swift.rlhf_trainers import utils as swift_utils
from vllm.lora.layers import BaseLayerWithLoRA


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


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Put the layers below an adapter in its layers' places: there they have the names by which checkpoints load."""
    adapted = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in adapted:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in adapted:
            setattr(parent, name, layer)


class DiscardedTables:
    """Keeps what vLLM's adapter layers hold, except parameters and buffers, through a sleep that discards it.

    Loading the base and the adapter writes all their weights. Tables that a layer has computed at its start are in the
    same memory, and vLLM saves buffers alone.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self) -> None:
        layers = (layer for layer in self._worker.get_model().modules() if isinstance(layer, BaseLayerWithLoRA))
        tables = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        self._saved = [(table, table.to("cpu", copy=True)) for table in tables]

    def restore(self) -> None:
        for table, saved in self._saved:
            table.copy_(saved)
        # vLLM writes which token has which adapter only if that has changed since the step before.
        self._worker.model_runner.lora_manager._adapter_manager._last_mapping = None
