"""The reference policy that the KL term pulls towards. It exists only where beta is not 0."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from peft import PeftModel

from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.reference_layout import ReferenceLayout
from swift_megatron_grpo.types import Sample, TokenValues


class Reference(Protocol):
    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        """At least of the samples that this rank's loss will see."""
        ...


class FrozenCopy:
    """Full tuning: a second model that is never trained."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        for model in passes.models:
            model.requires_grad_(False).eval()

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        return self.passes.infer(samples)


class FrozenCopyInOwnLayout:
    """A frozen copy in a layout of its own. Its ranks hold other samples than those that train, so they exchange."""

    def __init__(self, copy: FrozenCopy, layout: ReferenceLayout, coordinator: Coordinator) -> None:
        self._copy = copy
        self._layout = layout
        self._coordinator = coordinator

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with self._layout.active():
            values = self._copy.infer(samples)
        return self._coordinator.gather_samples(values, self._copy.passes.parallel)


class BaseUnderAdapter:
    """LoRA: the same model with the adapter switched off."""

    def __init__(self, passes: Passes, peft_models: Sequence[PeftModel]) -> None:
        self._passes = passes
        self._peft_models = list(peft_models)

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        with ExitStack() as stack:
            for model in self._peft_models:
                stack.enter_context(model.disable_adapter())
            return self._passes.infer(samples)
