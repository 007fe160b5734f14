"""Whose weights a rollout server has."""

from __future__ import annotations

from swift_megatron_grpo.protocol.messages import RUN_IDLE_SECONDS
from swift_megatron_grpo.server.run_lease import RunLease


def test_a_run_is_served_while_it_is_heard_of() -> None:
    lease = RunLease()
    assert lease.holder(5.0) is None and not lease.is_held_by("a") and not lease.is_held_by(None)
    assert not lease.touch(None, 100.0)  # a person looks
    assert lease.touch("a", 100.0) and lease.holder(100.0) == "a"
    assert not lease.touch("b", 101.0) and not lease.touch(None, 101.0)
    end = 100.0 + RUN_IDLE_SECONDS
    assert lease.holder(end - 0.1) == "a" and lease.holder(end) is None
    assert not lease.touch("a", end + 1)  # it was silent, and nobody came: the weights are still its own
    assert lease.holder(end + 1) == "a" and lease.is_held_by("a") and not lease.is_held_by("b")


def test_who_asks_after_a_run_has_ended_has_the_server() -> None:
    lease = RunLease()
    assert lease.touch("a", 100.0) and lease.touch("b", 100.0 + RUN_IDLE_SECONDS)
    assert not lease.touch("a", 101.0 + RUN_IDLE_SECONDS)
    assert lease.holder(101.0 + RUN_IDLE_SECONDS) == "b" and not lease.is_held_by("a")
    assert lease.touch("a", 100.0 + 2 * RUN_IDLE_SECONDS) and lease.is_held_by("a")


def test_who_leaves_is_not_waited_for() -> None:
    lease = RunLease()
    assert lease.touch("a", 100.0)
    lease.leave("b")
    lease.leave(None)
    assert lease.holder(101.0) == "a"
    lease.leave("a")
    assert lease.holder(101.0) is None and lease.touch("b", 101.0)
