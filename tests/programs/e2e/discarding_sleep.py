"""An external plugin for tests: vLLM on a CPU loses in a sleep at level 2 what it loses on a GPU.

No weight of the model and of the adapter is left, nor what vLLM keeps with them in the same memory: its tables are
filled with values that no kernel can use. Buffers stay, because vLLM restores them. With BASE_STAYS_LOST the weights
below the adapter are not loaded again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA

import swift_megatron_grpo.loop.assemble
from swift_megatron_grpo.generation.local.engine import _ASLEEP, LocalVllm
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.generation.vllm.adapter import DiscardedTables


def lost(worker: Any) -> Iterator[torch.Tensor]:
    """Return all tensors that vLLM allocates while it loads a model with an adapter, but buffers."""
    model = worker.get_model()
    yield from model.parameters()
    holders = [layer for layer in model.modules() if isinstance(layer, BaseLayerWithLoRA)]
    holders += list(model.lora_manager.punica_wrapper_mapping.values())
    for holder in holders:
        for value in vars(holder).values():
            yield from (part for part in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(part))


class DiscardingVllm(LocalVllm):
    memory_to_wake = 0

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._tables = DiscardedTables(self._worker)
        for layer in self._worker.get_model().modules():
            if isinstance(layer, BaseLayerWithLoRA):
                layer.computed_at_start = torch.arange(3)

    def sleep(self) -> None:
        if self._asleep:
            return
        self._reset_prefix_cache()
        self._tables.save()
        for tensor in lost(self._worker):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else -7)
        self._asleep, self._weights_version = _ASLEEP, NO_WEIGHTS

    def _wake(self, tag: str) -> None:
        self._asleep -= {tag}

    def load_base(self, weights: Any) -> None:
        layers = [layer for layer in self._worker.get_model().modules() if isinstance(layer, BaseLayerWithLoRA)]
        assert layers and all(layer.computed_at_start.tolist() == [0, 1, 2] for layer in layers)
        assert self._worker.get_model().lora_manager._last_mapping is None  # vLLM would not write its tables again
        if "BASE_STAYS_LOST" in os.environ:
            for _ in weights:  # on all ranks together
                pass
        else:
            super().load_base(weights)


swift_megatron_grpo.loop.assemble.LocalVllm = DiscardingVllm
