"""What leaves the GPU while vLLM generates on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer
from swift.megatron.trainers.utils import (
    load_megatron_model_to_gpu,
    load_megatron_optimizer,
    offload_megatron_model_to_cpu,
    offload_megatron_optimizer,
)

from swift_megatron_grpo.config import ResidencyConfig


class Residency:
    """Moves what the configuration names, and nothing else."""

    def __init__(
        self,
        config: ResidencyConfig,
        models: Sequence[torch.nn.Module],
        frozen: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
    ) -> None:
        self._model_parts = [list(models), list(frozen)] if config.offload_model else []
        self._optimizers = [optimizer] if config.offload_optimizer else []

    @contextmanager
    def for_generation(self) -> Iterator[None]:
        for models in self._model_parts:
            offload_megatron_model_to_cpu(models)
        for optimizer in self._optimizers:
            offload_megatron_optimizer(optimizer)
        try:
            yield
        finally:
            for models in self._model_parts:
                load_megatron_model_to_gpu(models)
            for optimizer in self._optimizers:
                load_megatron_optimizer(optimizer)
