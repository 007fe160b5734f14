"""Who is on the GPU in which phase.

The --offload flags permit that something leaves while vLLM generates. Whether it does is decided from measured memory:
when everything fits nothing moves. What left comes back in the phase that reads it, so nothing moves twice in between.

    make_room           what no weight sync reads leaves, if the engine needs its memory
    for_weight_sync     the policy is there
    for_generation      the policy leaves too, if the engine needs its memory
    for_inference       the policy is there
    for_reference       the frozen reference as well
    for_training        the policy, gradients and the optimizer's state are there; the reference only if it fits
    restore             all that other code may look at is there: between steps

Every rank decides for its own GPU; no move waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from transformer_engine.pytorch.module.base import _dummy_wgrads

from swift_megatron_grpo.config import ResidencyConfig
from swift_megatron_grpo.training.memory import storages as found
from swift_megatron_grpo.training.memory.offload import HostCopy, StorageGroup

GIB = 2**30
# What must stay free beside the reference in training: fragments, and lengths that vary from step to step.
TRAINING_MARGIN = 2 * GIB


def free_device_memory() -> int:
    """As the driver counts, for every process on this GPU."""
    return torch.cuda.mem_get_info()[0]


class Residency:
    def __init__(
        self,
        config: ResidencyConfig,
        models: Sequence[torch.nn.Module],  # as wrapped for training (DDP)
        frozen: Sequence[torch.nn.Module],  # the reference policy's own
        optimizer: MegatronOptimizer,
        tell: Callable[[str], None],  # a person, about a decision
        free_memory: Callable[[], int] = free_device_memory,
    ) -> None:
        stream = torch.cuda.Stream()
        self._tell = tell
        self._free_memory = free_memory
        self._drop_gradients = optimizer.zero_grad
        self._gradients = StorageGroup("gradients", partial(found.gradient_storages, models), host=None)
        self._reference = StorageGroup(
            "reference policy",
            lambda: found.frozen_storages(frozen) + found.trained_storages(frozen),
            HostCopy("the reference policy", stream, rarely_written=True),
        )
        self._optimizer = StorageGroup(
            "optimizer state",
            partial(found.optimizer_storages, optimizer, models),
            HostCopy("the optimizer's state", stream),
        )
        self._policy = [
            StorageGroup(
                "frozen weights",
                partial(found.frozen_storages, models),
                HostCopy("the frozen weights", stream, rarely_written=True),
            ),
            StorageGroup("weights", partial(found.trained_storages, models), HostCopy("the weights", stream)),
        ]
        # The cheapest to move first: gradients are not copied, the reference one way only.
        self._movable = [
            *([self._gradients] if config.offload_grad else []),
            *([self._reference] if config.offload_model else []),
            *([self._optimizer] if config.offload_optimizer else []),
            *(self._policy if config.offload_model else []),
        ]
        self._leaving: set[str] | None = None  # by the last decision
        self._reference_fits_training: bool | None = None
        self._spare_in_training: int | None = None  # with the reference on the GPU; the least since the last decision
        for inner in found.torch_optimizers(optimizer):
            inner.register_step_pre_hook(self._before_update)

    @property
    def groups(self) -> Mapping[str, StorageGroup]:
        """By name; all, also those that may not leave."""
        return {group.name: group for group in (self._gradients, self._reference, self._optimizer, *self._policy)}

    def make_room(self, needed: int) -> None:
        """The engine is about to take `needed` bytes of this GPU; 0 if it is awake or on another one."""
        self._decide_about_training()
        self._decide_who_leaves(needed)
        self._leave([group for group in self._movable if group not in self._policy])

    def for_weight_sync(self) -> None:
        self._return(*self._policy)

    def for_generation(self) -> None:
        self._leave(self._movable)

    def for_inference(self) -> None:
        self._return(*self._policy)

    def for_reference(self) -> None:
        self._return(*self._policy, self._reference)

    def for_training(self) -> None:
        if self._reference in self._movable and not self._reference_fits_training:
            self._reference.offload()
        self._return(*self._policy, self._gradients)
        self._optimizer.begin_reload()  # beside forward and backward; _before_update is the first to read it

    def restore(self) -> None:
        self._return(*self._policy, self._gradients, self._optimizer)

    def _leave(self, groups: Sequence[StorageGroup]) -> None:
        going = [group for group in groups if group.name in (self._leaving or ()) and not group.is_offloaded]
        if self._gradients in going:
            self._drop_gradients()  # the optimizer's fp32 copies of gradients that are accumulated in bf16
        for group in going:
            group.offload()
        if going:
            _give_unused_memory_back()  # vLLM's memory comes from another allocator

    def _return(self, *groups: StorageGroup) -> None:
        for group in groups:
            group.begin_reload()
        for group in groups:
            group.finish_reload()

    def _before_update(self, *_: Any) -> None:
        """Between backward and update. torch has kept all memory that it had taken at the peak of training."""
        self._optimizer.finish_reload()
        if self._reference in self._movable and (size := self._reference.nbytes()):
            spare = self._free_memory() - (size if self._reference.is_offloaded else 0)
            self._spare_in_training = min(spare, spare if self._spare_in_training is None else self._spare_in_training)

    def _decide_about_training(self) -> None:
        spare, self._spare_in_training = self._spare_in_training, None
        if spare is None:  # nothing was trained since
            return
        fits, before = spare >= TRAINING_MARGIN, self._reference_fits_training
        self._reference_fits_training = fits
        if fits is not before:
            stays = "stays on the GPU" if fits else "leaves the GPU"
            self._tell(f"the reference policy {stays} in training: beside it {max(spare, 0) / GIB:.1f} GiB are left")

    def _decide_who_leaves(self, needed: int) -> None:
        free = self._free_memory()
        if free < needed:
            _give_unused_memory_back()  # activations of the last step
            free = self._free_memory()
        here = (
            {group.name: group.nbytes() for group in self._movable if not group.is_offloaded} if free < needed else {}
        )
        chosen = groups_to_offload(needed - free, here)
        leaving = {group.name for group in self._movable if group.is_offloaded} | set(chosen)
        if needed and self._movable and leaving != self._leaving:
            missing = needed - free - sum(here[name] for name in chosen)
            self._tell(_story(needed, free, sorted(leaving), missing))
        self._leaving = leaving


def groups_to_offload(shortage: int, sizes: Mapping[str, int]) -> list[str]:
    """The first of `sizes`, in their order, that together make up for the shortage; all if they do not."""
    chosen = []
    for name, size in sizes.items():
        if shortage <= 0:
            break
        if size:
            chosen.append(name)
            shortage -= size
    return chosen


def _give_unused_memory_back() -> None:
    """To the driver.

    Transformer Engine keeps a placeholder for the gradient of every shape of weight. Backward makes them, among torch's
    largest segments, and no segment goes back that holds one: 16 MiB have kept 3 GiB. Backward makes them anew.
    """
    _dummy_wgrads.clear()
    torch.cuda.empty_cache()


def _story(needed: int, free: int, leaving: Sequence[str], missing: int) -> str:
    story = (
        f"vLLM needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB of the GPU are free: "
        f"{' and '.join(leaving) or 'nothing'} of the trainer leaves it"
    )
    if missing <= 0:
        return story
    return (
        f"{story}. {missing / GIB:.1f} GiB are still missing; if vLLM runs out of memory, use a lower "
        "--vllm_gpu_memory_utilization or more of --offload_model, --offload_optimizer and --offload_grad true"
    )
