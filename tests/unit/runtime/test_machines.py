"""Machines count silence by their own clock, and take whatever another machine may write."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from swift_megatron_grpo.runtime import machines
from swift_megatron_grpo.runtime.machines import Machines


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(machines, "_GREETING_SECONDS", 0.05)
    monkeypatch.setattr(machines, "_ANSWER_SECONDS", 0.5)


def wait_until(condition: Callable[[], object], *looking: Machines) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        for machine in looking:
            machine.look()
        time.sleep(0.02)


class Link:
    """A store that answers only while the link is up, to requests in progress as well."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.up = store, threading.Event()
        self.up.set()

    def set(self, key: str, value: str) -> None:
        self.up.wait()
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)


def test_a_machine_that_is_cut_off_names_the_one_with_the_store() -> None:
    """It does not know whether the third one lives. After its link has returned, nobody is silent."""
    store = HashStore()
    link = Link(store)
    first, third = (Machines(number, 3, f"rank {number}", lambda: store) for number in (0, 2))
    second = Machines(1, 3, "rank 1", lambda: link)
    every = (first, second, third)
    wait_until(lambda: all(other.value for each in every for other in each._others.values()), *every)
    link.up.clear()
    wait_until(lambda: second.lost(1.0) and first.lost(1.0), *every)
    assert "machine 0 (" in str(second.lost(1.0)) and "machine 1 (" in str(first.lost(1.0))
    (line,) = second.news(1.0)
    assert line.startswith("machine 0 (") and line.endswith("; the run ends after 1 s (--node_timeout)")
    assert not list(second.news(1.0))  # once
    link.up.set()
    wait_until(lambda: not any(each.lost(1.0) for each in every), *every)
    assert next(iter(second.news(1.0))).endswith("rank 0) answers again")
    for each in every:
        each.end()


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\x00", b"[]", b"1", b'{"name": 1}', json.dumps({"name": "a\nb" * 999, "ended": "c\x1b"}).encode()],
)
def test_what_another_machine_writes_cannot_break_this_one(value: bytes) -> None:
    store = HashStore()
    store.set("1", value)  # type: ignore[arg-type]  # bytes are accepted
    machine = Machines(0, 2, "rank 0", lambda: store)
    wait_until(lambda: machine._beat > 3, machine)
    assert machine._talker is not None and machine._talker.is_alive()
    ended = machine.ended()
    assert ended is None or (ended.isprintable() and len(ended) < 500)
    machine.end()
    assert not machine._talker.is_alive() or machine._told.is_set()


def test_a_machine_that_ends_tells_why() -> None:
    store = HashStore()
    first, second = (Machines(number, 2, f"rank {number}", lambda: store) for number in (0, 1))
    second.end("local rank 0, exit code 1")
    wait_until(first.ended, first)
    assert str(first.ended()).endswith("rank 1) has ended: local rank 0, exit code 1")
    assert first.lost(0.0) is None  # it is not silent, it has ended
    first.end()
