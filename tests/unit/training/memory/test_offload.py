"""Offloading and reloading groups of storages, and the choice of groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.training.memory.offload import CHUNK, HostCopy, StorageGroup, distinct, spans, without
from swift_megatron_grpo.training.memory.residency import groups_to_offload


@given(sizes=st.lists(st.integers(0, 40), max_size=12), size=st.integers(1, 16))
def test_every_byte_is_copied_to_exactly_one_place_in_the_chunks(sizes: list[int], size: int) -> None:
    contents = list(torch.arange(sum(sizes)).split(sizes))
    places = torch.full((-(-sum(sizes) // size) * size,), -1)
    for content, chunk in spans(contents, places.split(size) if len(places) else []):
        assert len(content) == len(chunk) > 0
        chunk.copy_(content)
    assert places[: sum(sizes)].tolist() == list(range(sum(sizes))) and bool((places[sum(sizes) :] == -1).all())


def overwrite_free_memory(nbytes: int) -> None:
    """Overwrite memory that the allocator reuses, as later work would."""
    torch.full((nbytes,), 255, dtype=torch.uint8)


@pytest.mark.parametrize("rarely_written", [False, True])
def test_views_are_valid_and_identical_after_a_round_trip(rarely_written: bool) -> None:
    buffer = torch.randn(CHUNK // 4 + 1001, dtype=torch.float32)  # more than one chunk
    view, odd = buffer[5:25].view(4, 5), torch.randn(3).to(torch.bfloat16)  # 6 bytes
    before = [tensor.clone() for tensor in (buffer, view, odd)]
    host = HostCopy("weights", torch.cuda.Stream(), rarely_written)
    group = StorageGroup("weights", lambda: distinct([buffer, view, odd, buffer[None]]), host)
    size = group.nbytes()
    assert size == buffer.nbytes + 6  # the views' storage counts once
    for _ in range(2):
        group.offload()
        group.offload()  # a second call has no effect
        assert group.is_offloaded and group.nbytes() == size
        assert [tensor.untyped_storage().nbytes() for tensor in (buffer, view, odd)] == [0, 0, 0]
        overwrite_free_memory(buffer.numel() * 4)
        group.begin_reload()
        group.finish_reload()
        assert not group.is_offloaded
        assert all(torch.equal(a, b) for a, b in zip((buffer, view, odd), before, strict=True))


@pytest.mark.parametrize("rarely_written", [False, True])
def test_values_written_between_two_offloads_are_kept(rarely_written: bool) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    host = HostCopy("weights", torch.cuda.Stream(), rarely_written)
    group = StorageGroup("weights", lambda: distinct([weight]), host)
    for value in (0.0, 0.0, 1.0, 1.0, -2.0):
        weight[7] = value
        group.offload()
        overwrite_free_memory(2000)
        group.begin_reload()
        group.finish_reload()
        assert weight[7] == value and weight.float().abs().sum() == abs(value)


def test_new_storages_are_included_in_the_next_offload() -> None:
    tensors = [torch.ones(8)]
    group = StorageGroup("optimizer state", lambda: distinct(tensors), HostCopy("states", torch.cuda.Stream()))
    for _ in range(3):
        group.offload()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        group.begin_reload()
        group.finish_reload()
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        tensors.append(torch.ones(CHUNK // 4))


def test_a_group_without_a_host_copy_is_zero_after_a_reload() -> None:
    gradient = torch.ones(10)
    group = StorageGroup("gradients", lambda: distinct([gradient]), host=None)
    group.offload()
    overwrite_free_memory(40)
    group.begin_reload()
    group.finish_reload()
    assert not gradient.any()


def test_an_empty_group_is_never_offloaded() -> None:
    group = StorageGroup("reference policy", list, HostCopy("reference", torch.cuda.Stream()))
    group.offload()
    assert not group.is_offloaded and group.nbytes() == 0
    group.begin_reload()
    group.finish_reload()


def test_storages_are_compared_by_identity() -> None:
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
        (99, list(SIZES)),  # not enough, but all there is
    ],
)
def test_no_more_groups_are_offloaded_than_needed(shortage: int, chosen: list[str]) -> None:
    assert groups_to_offload(shortage, SIZES) == chosen


def test_empty_groups_are_not_chosen() -> None:
    assert groups_to_offload(5, {"gradients": 0, "weights": 9}) == ["weights"]
