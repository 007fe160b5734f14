"""The reference policy of the KL term. It exists only if beta is not 0."""

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
