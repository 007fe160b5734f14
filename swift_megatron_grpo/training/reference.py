"""The reference policy of the KL term. It exists only if beta is not 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mcore_bridge import GPTBridge
from mcore_bridge.bridge import gpt_bridge
from megatron.core import parallel_state
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.settings.layout import Layout
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Sample, TokenValues

MOVED = "reference"  # folder of a moved reference, in a checkpoint
_EXPERT_BIAS = "expert_bias"  # megatron-core's name for the buffer of a router
REFERENCE_ADAPTER = "ref_adapter"  # ms-swift's name for the adapter of --ref_adapters
# Independent of the layout: scratch memory, and the list of all groups ever created. megatron-core 0.17 and newer have
# no _GLOBAL_SYMMETRIC_MEMORY_BUFFER.
_SHARED = {"_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_global_process_group_list"}


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen policy: a second model that is never trained, or the trained one with its adapter off or exchanged.

    `active`: runs the passes' model as the reference. `coordinator`: given if a rank may get other samples than it
    trains, because the copy has its own layout or size, or reads other prompts; results are gathered then.
    """

    passes: Passes
    active: Callable[[], AbstractContextManager[None]] = nullcontext
    coordinator: Coordinator | None = None

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        """Compute log-probs by sample index, at least for the samples that this rank trains on."""
        with self.active():
            values = self.passes.infer(samples)
        return values if self.coordinator is None else self.coordinator.gather_samples(values, self.passes.parallel)


@dataclass(frozen=True, slots=True)
class MovingReference:
    """Moves the frozen copy of the reference towards the policy (--sync_ref_model), and keeps it in checkpoints.

    reference <- (1 - share) reference + share policy, https://arxiv.org/abs/2404.09656, after every `period` steps.
    """

    copy: Sequence[Any]
    policy: Sequence[torch.nn.Module]  # unwrapped, in the layout of the copy
    residency: Residency
    period: int
    share: float

    @torch.no_grad()
    def after_step(self, steps_done: int) -> None:
        if steps_done % self.period:
            return
        self.residency.for_weight_sync()
        self.residency.for_reference()
        for copy, policy in zip(self.copy, self.policy, strict=True):
            for (name, held), (trained, value) in zip(copy.named_parameters(), policy.named_parameters(), strict=True):
                if name != trained:
                    raise ValueError(f"--sync_ref_model: the reference has {name} where the policy has {trained}")
                held.copy_(torch.lerp(held.float(), value.float(), self.share))
            trained_buffers = dict(policy.named_buffers())
            for name, held in copy.named_buffers():
                if name.endswith(_EXPERT_BIAS):  # moves with --megatron_extra_kwargs moe_router_bias_update_rate
                    held.copy_(torch.lerp(held.float(), trained_buffers[name].float(), self.share))

    def save(self, folder: str) -> None:
        """Write the copy into a checkpoint, in the format of transformers and independent of the layout."""
        self.residency.for_reference()
        self.copy[0].config.bridge.save_weights(list(self.copy), str(Path(folder, MOVED)))


@contextmanager
def adapter_disabled(models: Sequence[PeftModel]) -> Iterator[None]:
    """Run the base of these models: the reference of LoRA."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.disable_adapter())
        yield


@contextmanager
def reference_adapter_active(models: Sequence[PeftModel]) -> Iterator[None]:
    """Run these models with the adapter of --ref_adapters. Peft's set_adapter would also train that one."""
    with ExitStack() as stack:
        for layer in (part for model in models for part in model.modules() if isinstance(part, BaseTunerLayer)):
            stack.enter_context(replaced(layer, "_active_adapter", [REFERENCE_ADAPTER]))
        yield


def load_reference_adapter(bridge: GPTBridge, models: Sequence[torch.nn.Module], folder: str | None) -> None:
    """Load the adapter of --ref_adapters, which ms-swift has created; None: there is none."""
    if folder is not None:
        bridge.load_weights(list(models), folder, peft_format=True, adapter_name=REFERENCE_ADAPTER)


class ReferenceLayout:
    """A second parallel layout of the same ranks, for a copy that needs less parallelism than the trained model.

    Megatron keeps its process groups in global variables of one module; layers read them when they are built or when
    they run. All ranks create a second set of groups once, and `active` swaps it in while the copy is built or runs.
    """

    def __init__(self, layout: Layout, timeout_minutes: int) -> None:
        first = _current_groups()
        shared = {name: value for name, value in vars(parallel_state).items() if name in _SHARED}
        # destroy_model_parallel would also destroy some of the groups
        vars(parallel_state).update(dict.fromkeys([*first, *shared]))
        parallel_state._HYBRID_DP_CP_GROUPS = {}
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor_model_parallel_size,
                pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
                context_parallel_size=layout.context_parallel_size,
                expert_model_parallel_size=layout.expert_model_parallel_size,
                expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
                distributed_timeout_minutes=timeout_minutes,
            )
            self._groups = _current_groups()
            self._group_of_bridge: Any = None
        finally:
            vars(parallel_state).update(first | shared)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this layout the current one inside the context."""
        first = _current_groups()
        vars(parallel_state).update(self._groups)
        with replaced(gpt_bridge, "EP_PP_GROUP", self._group_of_bridge):
            try:
                yield
            finally:
                self._group_of_bridge = gpt_bridge.EP_PP_GROUP  # mcore-bridge creates it on first use
                vars(parallel_state).update(first)


def _current_groups() -> dict[str, Any]:
    """Return Megatron's groups, ranks and sizes: the private variables of parallel_state."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper() and name not in _SHARED
    }
