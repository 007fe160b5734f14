"""The reference policy of the KL term. It exists only if beta is not 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from mcore_bridge import GPTBridge
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.reference_layout import ReferenceLayout
from swift_megatron_grpo.types import Sample, TokenValues

REFERENCE_ADAPTER = "ref_adapter"  # ms-swift's name for the adapter of --ref_adapters


class Reference(Protocol):
    """A frozen policy that computes log-probs."""

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        """Compute log-probs by sample index, at least for the samples that this rank trains on."""
        ...


class FrozenCopy:
    """Reference for full tuning: a second model that is never trained."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        for model in passes.models:
            model.requires_grad_(False).eval()

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        return self.passes.infer(samples)


class FrozenCopyInOwnLayout:
    """Frozen copy in its own parallel layout.

    A rank holds other samples of the copy than it trains, so the results are gathered.
    """

    def __init__(self, copy: FrozenCopy, layout: ReferenceLayout, coordinator: Coordinator) -> None:
        self._copy = copy
        self._layout = layout
        self._coordinator = coordinator

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with self._layout.active():
            values = self._copy.infer(samples)
        return self._coordinator.gather_samples(values, self._copy.passes.parallel)


class BaseUnderAdapter:
    """Reference for LoRA: the trained model with its adapter disabled."""

    def __init__(self, passes: Passes, peft_models: Sequence[PeftModel]) -> None:
        self._passes = passes
        self._peft_models = list(peft_models)

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with ExitStack() as stack:
            for model in self._peft_models:
                stack.enter_context(model.disable_adapter())
            return self._passes.infer(samples)


class SecondAdapter:
    """Reference for LoRA with --ref_adapters: the trained model with another, frozen adapter."""

    def __init__(self, passes: Passes, peft_models: Sequence[PeftModel]) -> None:
        self._passes = passes
        self._peft_models = list(peft_models)

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with _reference_adapter_active(self._peft_models):
            return self._passes.infer(samples)


def load_reference_adapter(bridge: GPTBridge, models: Sequence[torch.nn.Module], folder: str | None) -> None:
    """Load the adapter of --ref_adapters, which ms-swift has created; None: there is none."""
    if folder is not None:
        bridge.load_weights(list(models), folder, peft_format=True, adapter_name=REFERENCE_ADAPTER)


@contextmanager
def _reference_adapter_active(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run these models with the reference adapter. Peft's set_adapter would also exchange which adapter is trained."""
    layers = [part for model in models for part in model.modules() if isinstance(part, BaseTunerLayer)]
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [REFERENCE_ADAPTER]
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active
