"""Objects of set-up are no longer scanned, and the memory of later ones is freed as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.ranks import megatron_torn_down
from swift_megatron_grpo.loop import assemble
from swift_megatron_grpo.loop.assemble import freeze_heap


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> tuple[Node, Node]:
    one, other = Node(), Node()
    one.other, other.other = other, one
    return one, other


@pytest.fixture(autouse=True)
def refrozen() -> Iterator[None]:
    """Freeze what this process was forked with again: each scan of it would take a second."""
    yield
    gc.unfreeze()
    gc.freeze()


def is_scanned(wanted: object) -> bool:
    return any(candidate is wanted for candidate in gc.get_objects())


def test_objects_of_set_up_are_not_scanned() -> None:
    early = Node()
    assert is_scanned(early)
    freeze_heap()
    late = Node()
    assert not is_scanned(early) and is_scanned(late)


def test_garbage_of_set_up_is_collected_before() -> None:
    one, other = cycle()
    alive = weakref.ref(one)
    del one, other
    freeze_heap()
    assert alive() is None


def test_a_frozen_object_is_freed_with_its_last_reference() -> None:
    early = Node()
    alive = weakref.ref(early)
    freeze_heap()
    del early
    assert alive() is None


def test_cycles_of_steps_are_collected() -> None:
    freeze_heap()
    one, other = cycle()
    alive = weakref.ref(one)
    del one, other
    gc.collect()
    assert alive() is None


def test_the_next_layout_of_a_process_begins_unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = cycle()
    alive = weakref.ref(one)
    freeze_heap()
    del one, other
    gc.collect()
    assert alive() is not None
    for name in ("mpu.destroy_model_parallel", "num_microbatches_calculator.unset_num_microbatches_calculator"):
        monkeypatch.setattr(f"megatron.core.{name}", lambda: None)
    with megatron_torn_down():
        pass
    assert alive() is None


def test_the_heap_is_frozen_once_all_stages_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Node()
    monkeypatch.setattr(assemble, "assemble_stages", lambda *_: stages)
    monkeypatch.setattr(assemble, "GRPOLoop", lambda *_: SimpleNamespace(kl_controller=SimpleNamespace(restore=list)))
    run: Any = SimpleNamespace(
        checkpoints=(), rollouts_done=0,
        coordinator=SimpleNamespace(all_gather=lambda value: [value], rank=0, world_size=2),
    )  # fmt: skip
    nothing: Any = SimpleNamespace()
    assemble.assemble_loop(nothing, nothing, run, SimpleNamespace(iteration=0), total_steps=1)
    assert not is_scanned(stages)
