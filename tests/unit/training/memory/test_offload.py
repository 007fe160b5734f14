"""Storages that leave and come back, and the decision who leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.training.memory.offload import CHUNK, HostCopy, StorageGroup, split_over_chunks
from swift_megatron_grpo.training.memory.residency import groups_to_offload
from swift_megatron_grpo.training.memory.storages import distinct, without


@given(sizes=st.lists(st.integers(0, 40), max_size=12), chunk=st.integers(1, 16))
def test_every_byte_has_one_place_in_the_chunks(sizes: list[int], chunk: int) -> None:
    pieces = list(split_over_chunks(sizes, chunk))
    read = [(p.storage, p.start + i) for p in pieces for i in range(p.length)]
    assert read == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    written = [p.chunk * chunk + p.offset + i for p in pieces for i in range(p.length)]
    assert written == list(range(sum(sizes)))
    assert all(p.offset + p.length <= chunk for p in pieces)


def dirty(nbytes: int) -> None:
    """Whoever gets the memory next writes to it."""
    torch.full((nbytes,), 255, dtype=torch.uint8)


@pytest.mark.parametrize("rarely_written", [False, True])
def test_views_are_valid_and_identical_after_a_round_trip(rarely_written: bool) -> None:
    buffer = torch.randn(CHUNK // 4 + 1001, dtype=torch.float32)  # more than one chunk
    view, odd = buffer[5:25].view(4, 5), torch.randn(3).to(torch.bfloat16)  # 6 bytes
    before = [each.clone() for each in (buffer, view, odd)]
    host = HostCopy("it", torch.cuda.Stream(), rarely_written)
    group = StorageGroup("weights", lambda: distinct([buffer, view, odd, buffer[None]]), host)
    size = group.nbytes()
    assert size == buffer.nbytes + 6  # the views' storage counts once
    for _ in range(2):
        group.offload()
        group.offload()  # it is away already
        assert group.is_offloaded and group.nbytes() == size
        assert [each.untyped_storage().nbytes() for each in (buffer, view, odd)] == [0, 0, 0]
        dirty(buffer.numel() * 4)
        group.begin_reload()
        group.finish_reload()
        assert not group.is_offloaded
        assert all(torch.equal(a, b) for a, b in zip((buffer, view, odd), before, strict=True))


@pytest.mark.parametrize("rarely_written", [False, True])
def test_what_was_written_between_two_absences_is_kept(rarely_written: bool) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    group = StorageGroup("weights", lambda: distinct([weight]), HostCopy("it", torch.cuda.Stream(), rarely_written))
    for value in (0.0, 0.0, 1.0, 1.0, -2.0):
        weight[7] = value
        group.offload()
        dirty(2000)
        group.begin_reload()
        group.finish_reload()
        assert weight[7] == value and weight.float().abs().sum() == abs(value)


def test_storages_that_came_into_being_leave_the_next_time() -> None:
    tensors = [torch.ones(8)]
    group = StorageGroup("optimizer state", lambda: distinct(tensors), HostCopy("it", torch.cuda.Stream()))
    for _ in range(3):
        group.offload()
        assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
        group.begin_reload()
        group.finish_reload()
        assert all(bool((each == 1).all()) for each in tensors)
        tensors.append(torch.ones(CHUNK // 4))


def test_what_is_not_kept_comes_back_as_zeros() -> None:
    gradient = torch.ones(10)
    group = StorageGroup("gradients", lambda: distinct([gradient]), host=None)
    group.offload()
    dirty(40)
    group.begin_reload()
    group.finish_reload()
    assert not gradient.any()


def test_a_group_of_nothing_is_never_away() -> None:
    group = StorageGroup("reference policy", list, HostCopy("it", torch.cuda.Stream()))
    group.offload()
    assert not group.is_offloaded and group.nbytes() == 0
    group.begin_reload()
    group.finish_reload()


def test_storages_are_told_apart_by_identity() -> None:
    buffer, other = torch.zeros(6), torch.zeros(6)
    assert len(distinct([buffer[:3], buffer[3:], other])) == 2
    assert without(distinct([buffer, other]), distinct([buffer[1:]])) == distinct([other])
    assert distinct([torch.zeros(0)]) == []


SIZES = {"gradients": 6, "reference policy": 3, "optimizer state": 20, "weights": 3}


@pytest.mark.parametrize(
    ("shortage", "chosen"),
    [
        (-5, []),  # everything fits
        (0, []),
        (1, ["gradients"]),
        (6, ["gradients"]),
        (7, ["gradients", "reference policy"]),
        (29, ["gradients", "reference policy", "optimizer state"]),
        (30, list(SIZES)),
        (99, list(SIZES)),  # too little, still the best there is
    ],
)
def test_no_more_leaves_than_is_needed(shortage: int, chosen: list[str]) -> None:
    assert groups_to_offload(shortage, SIZES) == chosen


def test_what_has_no_size_is_not_said_to_leave() -> None:
    assert groups_to_offload(5, {"gradients": 0, "weights": 9}) == ["weights"]
