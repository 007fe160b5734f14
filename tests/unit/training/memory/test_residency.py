"""Decisions about offloading: memory that torch's allocator caches counts as free, once a decision needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.module.base import _dummy_wgrads

from swift_megatron_grpo.settings.trained import Offloading
from swift_megatron_grpo.training.memory.residency import GIB, Residency

EVERYTHING = Offloading(offload_model=True, offload_optimizer=True, offload_grad=True)
NEEDED = 10 * GIB


class Device:
    """A GPU on which torch caches memory. Emptying the cache frees it, unless a placeholder of a gradient is in it."""

    def __init__(self) -> None:
        self.free = NEEDED
        self.cached = 0

    def free_memory(self) -> int:
        return self.free

    def use_and_cache(self, nbytes: int) -> None:
        self.free -= nbytes
        self.cached += nbytes
        _dummy_wgrads[(2, 2), torch.float32] = torch.empty(2, 2)

    def empty_cache(self) -> None:
        if not _dummy_wgrads:
            self.free += self.cached
            self.cached = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    yield device
    _dummy_wgrads.clear()


def residency_on(device: Device, log: Callable[[str], None]) -> Residency:
    model = torch.nn.Linear(8, 8)
    inner = torch.optim.Adam(model.parameters())
    optimizer: Any = SimpleNamespace(optimizer=inner, zero_grad=inner.zero_grad)
    return Residency(EVERYTHING, [model], [], optimizer, log, device.free_memory)


def offloaded(residency: Residency) -> list[str]:
    return [name for name, group in residency.groups.items() if group.is_offloaded]


def test_nothing_is_offloaded_if_only_last_activations_are_missing(device: Device) -> None:
    logged: list[str] = []
    residency = residency_on(device, logged.append)
    device.use_and_cache(3 * GIB)
    residency.make_room(NEEDED)
    residency.for_generation(NEEDED)
    assert offloaded(residency) == [] and device.cached == 0
    assert logged == [
        "Before the weight sync: vLLM needs 10.0 GiB and 10.0 GiB of the GPU are free: the trainer offloads nothing"
    ]


def test_nothing_is_offloaded_if_only_the_weight_syncs_cache_is_missing(device: Device) -> None:
    residency = residency_on(device, lambda message: None)
    residency.make_room(NEEDED)
    residency.for_weight_sync()
    device.use_and_cache(3 * GIB)
    residency.for_generation(NEEDED)
    assert offloaded(residency) == [] and device.cached == 0


def test_the_cache_is_kept_if_enough_is_free_without_it(device: Device) -> None:
    residency = residency_on(device, lambda message: None)
    device.use_and_cache(3 * GIB)
    residency.make_room(NEEDED - 3 * GIB)
    residency.for_generation(NEEDED - 3 * GIB)
    assert offloaded(residency) == [] and device.cached == 3 * GIB


def test_what_the_cache_lacks_is_offloaded_after_the_weight_sync(device: Device) -> None:
    logged: list[str] = []
    residency = residency_on(device, logged.append)
    residency.make_room(NEEDED)
    residency.for_weight_sync()
    device.use_and_cache(3 * GIB)
    device.free -= 1
    residency.for_generation(NEEDED)
    assert offloaded(residency) == ["weights"]  # there are no gradients and no states of the optimizer yet
    assert logged[-1].startswith("After the weight sync: ") and logged[-1].endswith("the trainer offloads weights")


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_teacher_loads_the_reference_only_if_it_is_that(device: Device, is_reference: bool) -> None:
    """One behind a server has no weights here."""
    model, reference = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    inner = torch.optim.Adam(model.parameters())
    optimizer: Any = SimpleNamespace(optimizer=inner, zero_grad=inner.zero_grad)
    teacher = [reference] * is_reference
    residency = Residency(EVERYTHING, [model], [reference], optimizer, print, device.free_memory, teacher)
    residency.for_training()
    residency.for_teacher()
    assert offloaded(residency) == ["reference policy"] * (not is_reference)


@pytest.mark.parametrize("flag", ["offload_model", "offload_teacher_model"])
def test_frozen_policies_take_turns_unless_they_fit_beside_training(device: Device, flag: str) -> None:
    logged: list[str] = []
    model, reference, teacher = (torch.nn.Linear(8, 8) for _ in range(3))
    inner = torch.optim.Adam(model.parameters())
    optimizer: Any = SimpleNamespace(optimizer=inner, zero_grad=inner.zero_grad)
    config = Offloading(**{"offload_model": False, "offload_optimizer": False, flag: True})
    weights = teacher.weight.detach().clone()
    residency = Residency(config, [model], [reference], optimizer, logged.append, device.free_memory, [teacher])
    both = flag == "offload_model"
    residency.for_reference()
    assert offloaded(residency) == ["teacher"]
    residency.for_teacher()
    assert offloaded(residency) == ["reference policy"] * both and teacher.weight.equal(weights)
    residency.for_training()
    assert offloaded(residency) == [*["reference policy"] * both, "teacher"]
    model(torch.ones(1, 8)).sum().backward()
    inner.step()  # measures 10 GiB
    residency.make_room(0)
    residency.for_teacher()
    residency.for_training()
    names = "the reference policy and the teacher stay" if both else "the teacher stays"
    assert offloaded(residency) == ["reference policy"] * both and logged[0].startswith(f"{names} on the GPU")
