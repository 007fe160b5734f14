"""Decides which parts of the trainer's state are on the GPU in which phase.

The --offload flags permit offloading while vLLM generates. Whether it happens is decided from measured memory: if
everything fits, nothing is offloaded. A group is reloaded in the phase that reads it, so it never moves needlessly.
`Residency` has a method for each phase, in the order of a step.

Every rank decides for its own GPU, and no move waits for another rank. With --overlap_param_gather, weights that are
not gathered yet are gathered before anything moves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from transformer_engine.pytorch.module.base import _dummy_wgrads

from swift_megatron_grpo.settings.trained import Offloading
from swift_megatron_grpo.training.memory import offload
from swift_megatron_grpo.training.trained_weights import gather_parameters

GIB = 2**30
# Must stay free in training next to the reference: fragmentation, and lengths that vary from step to step.
TRAINING_MARGIN = 2 * GIB


class Residency:
    """Offloads and reloads the groups of storages of one rank."""

    def __init__(
        self,
        config: Offloading,
        models: Sequence[torch.nn.Module],  # as wrapped for training (DDP)
        reference: Sequence[torch.nn.Module],  # of the frozen copy
        optimizer: MegatronOptimizer,
        log: Callable[[str], None],  # called when a decision changes
        free_memory: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0],  # the driver's, of all processes
        teacher: Sequence[torch.nn.Module] = (),  # empty if it has no weights of its own; may be the reference
    ) -> None:
        stream = torch.cuda.Stream()
        self._models = models
        self._log = log
        self._free_memory = free_memory
        self._drop_gradients = optimizer.zero_grad
        self._gradients = offload.StorageGroup("gradients", partial(offload.gradient_storages, models), host=None)

        def copied(
            name: str, find: Callable[[], offload.Storages], rarely_written: bool = False
        ) -> offload.StorageGroup:
            return offload.StorageGroup(name, find, offload.HostCopy(name, stream, rarely_written))

        def frozen(name: str, models: Sequence[torch.nn.Module]) -> offload.StorageGroup:
            return copied(name, lambda: offload.frozen_storages(models) + offload.trained_storages(models), True)

        self._reference = frozen("reference policy", reference)
        own_of_teacher = [frozen("teacher", teacher)] if teacher and teacher != reference else []
        self._frozen = [self._reference, *own_of_teacher]
        self._teacher = self._frozen[-1] if teacher else None
        self._optimizer = copied("optimizer state", partial(offload.optimizer_storages, optimizer, models))
        self._policy = [
            copied("frozen weights", partial(offload.frozen_storages, models), rarely_written=True),
            copied("weights", partial(offload.trained_storages, models)),
        ]
        # The cheapest to move first: gradients are not copied, the reference one way only.
        self._movable = [
            *([self._gradients] if config.offload_grad else []),
            *([self._reference] if config.offload_model else []),
            *(own_of_teacher if config.offload_model or config.offload_teacher_model else []),
            *([self._optimizer] if config.offload_optimizer else []),
            *(self._policy if config.offload_model else []),
        ]
        self._chosen: set[str] | None = None  # names of the groups to offload, by the last decision
        self._logged: dict[str, set[str]] = {}  # the same as it was logged last, by the moment of the decision
        self._frozen_fit_training: bool | None = None
        self._spare_in_training: int | None = None  # with them on the GPU; the least since the last decision
        for inner in offload.torch_optimizers(optimizer):
            inner.register_step_pre_hook(self._before_update)

    @property
    def groups(self) -> Mapping[str, offload.StorageGroup]:
        """All groups by name, including those that may not be offloaded."""
        return {group.name: group for group in (self._gradients, *self._frozen, self._optimizer, *self._policy)}

    @property
    def _movable_frozen(self) -> list[offload.StorageGroup]:
        """The frozen policies that may be offloaded, without one that has no weights of its own."""
        return [group for group in self._frozen if group in self._movable and group.nbytes()]

    def make_room(self, needed: int) -> None:
        """Decide what to offload, and offload all of it but the policy.

        `needed`: bytes of this GPU that the inference engine will allocate; 0 if it is awake or on another GPU.
        """
        gather_parameters(self._models)
        self._decide_about_training()
        self._decide_what_to_offload(needed, "Before")
        self._offload([group for group in self._movable if group not in self._policy])

    def for_weight_sync(self) -> None:
        self._reload(*self._policy)
        gather_parameters(self._models)

    def for_generation(self, needed: int) -> None:
        """Offload all groups that the last decision names, the policy included, and more if memory is short by now.

        `needed`: bytes that the inference engine will still allocate. The sync has used memory since the decision,
        and torch's allocator may still cache it.
        """
        self._offload(self._movable)
        self._decide_what_to_offload(needed, "After")
        self._offload(self._movable)

    def for_inference(self) -> None:
        self._reload(*self._policy)

    def for_reference(self) -> None:
        self._reload_frozen(self._reference)

    def for_teacher(self) -> None:
        if self._teacher is None:
            self.for_inference()
        else:
            self._reload_frozen(self._teacher)

    def for_training(self) -> None:
        """Reload everything that a training step reads; offload frozen policies if they do not fit."""
        self._offload_frozen()
        self._reload(*self._policy, self._gradients)
        self._optimizer.begin_reload()  # overlaps with forward and backward; _before_update is the first to read it

    def restore(self) -> None:
        """Reload everything that code between steps may read."""
        self._reload(*self._policy, self._gradients, self._optimizer)
        gather_parameters(self._models)

    def _offload(self, groups: Sequence[offload.StorageGroup]) -> None:
        chosen = [group for group in groups if group.name in (self._chosen or ()) and not group.is_offloaded]
        if self._gradients in chosen:
            self._drop_gradients()  # the optimizer's fp32 copies of gradients that are accumulated in bf16
        for group in chosen:
            group.offload()
        if chosen:
            _release_unused_memory()  # vLLM's memory comes from another allocator

    def _reload(self, *groups: offload.StorageGroup) -> None:
        for group in groups:
            group.begin_reload()
        for group in groups:
            group.finish_reload()

    def _reload_frozen(self, group: offload.StorageGroup) -> None:
        """Reload a frozen policy, and the trained one, which may have the same weights; offload the other."""
        self._offload_frozen(keep=group)
        self._reload(*self._policy, group)

    def _offload_frozen(self, keep: offload.StorageGroup | None = None) -> None:
        if not self._frozen_fit_training:
            for group in self._movable_frozen:
                if group is not keep:
                    group.offload()

    def _before_update(self, *_: Any) -> None:
        """Wait for the optimizer's state, and measure spare memory: the allocator still holds the peak of training."""
        self._optimizer.finish_reload()
        if frozen := self._movable_frozen:
            spare = self._free_memory() - sum(group.nbytes() for group in frozen if group.is_offloaded)
            self._spare_in_training = min(spare, spare if self._spare_in_training is None else self._spare_in_training)

    def _decide_about_training(self) -> None:
        spare = self._spare_in_training
        self._spare_in_training = None
        if spare is None:  # nothing was trained since
            return
        fits = spare >= TRAINING_MARGIN
        before = self._frozen_fit_training
        self._frozen_fit_training = fits
        if fits is not before:
            names = [group.name for group in self._movable_frozen]
            kept, moved = ("stays", "is") if len(names) == 1 else ("stay", "are")
            action = f"{kept} on the GPU" if fits else f"{moved} offloaded"
            free = f"{max(spare, 0) / GIB:.1f} GiB are free"
            self._log(f"the {' and the '.join(names)} {action} in training: next to it {free}")

    def _decide_what_to_offload(self, needed: int, moment: str) -> None:
        free = self._free_memory()
        if free < needed:
            _release_unused_memory()  # activations of the last step, or what the weight sync used
            free = self._free_memory()
        on_gpu = [group for group in self._movable if not group.is_offloaded]
        sizes = {group.name: group.nbytes() for group in on_gpu} if free < needed else {}
        added = groups_to_offload(needed - free, sizes)
        chosen = {group.name for group in self._movable if group.is_offloaded} | set(added)
        logged = self._logged.get(moment, self._chosen)  # the other moment's decision, before the first at this one
        if needed and self._movable and chosen != logged:
            missing = needed - free - sum(sizes[name] for name in added)
            self._log(_message(moment, needed, free, sorted(chosen), missing))
            self._logged[moment] = chosen
        self._chosen = chosen


def groups_to_offload(shortage: int, sizes: Mapping[str, int]) -> list[str]:
    """Return the first groups of `sizes` that together cover the shortage; all of them if they do not."""
    chosen = []
    for name, size in sizes.items():
        if shortage <= 0:
            break
        if size:
            chosen.append(name)
            shortage -= size
    return chosen


def _release_unused_memory() -> None:
    """Release to the driver the memory that torch's allocator caches.

    Transformer Engine keeps a placeholder for the gradient of every weight shape. Backward allocates them inside
    torch's largest segments, and a segment that holds one cannot be released: 16 MiB have kept 3 GiB. They are dropped
    here, and the next backward allocates them again.
    """
    _dummy_wgrads.clear()
    torch.cuda.empty_cache()


def _message(moment: str, needed: int, free: int, offloaded: Sequence[str], missing: int) -> str:
    message = (
        f"{moment} the weight sync: vLLM needs {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB of the GPU are free: "
        f"the trainer offloads {' and '.join(offloaded) or 'nothing'}"
    )
    if missing <= 0:
        return message
    return (
        f"{message}. {missing / GIB:.1f} GiB are still missing; if vLLM runs out of memory, use a lower "
        "--vllm_gpu_memory_utilization or more of --offload_model, --offload_optimizer and --offload_grad true"
    )
