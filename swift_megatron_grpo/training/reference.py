"""The reference policy that the KL term pulls towards. It exists only where beta is not 0."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
from peft import PeftModel

from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.types import Sample, TokenValues


class Reference(Protocol):
    def infer(self, engine: MegatronEngine, samples: Sequence[Sample]) -> dict[int, TokenValues]: ...


class FrozenCopy:
    """Full tuning: a second model that is never trained."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = list(models)
        for model in self.models:
            model.requires_grad_(False).eval()

    def infer(self, engine: MegatronEngine, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        return engine.infer(samples, models=self.models)


class BaseUnderAdapter:
    """LoRA: the same model with the adapter switched off."""

    def __init__(self, peft_models: Sequence[PeftModel]) -> None:
        self._peft_models = list(peft_models)

    def infer(self, engine: MegatronEngine, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with ExitStack() as stack:
            for model in self._peft_models:
                stack.enter_context(model.disable_adapter())
            return engine.infer(samples)
