"""The lease of a rollout server: one run holds it, until it releases it or is idle for too long."""

from __future__ import annotations

from swift_megatron_grpo.generation.protocol.messages import RUN_IDLE_SECONDS, RunIdentity
from swift_megatron_grpo.generation.server.routes import RunLease

A, B = RunIdentity("a", "secret of a"), RunIdentity("b", "secret of b")


def test_a_run_holds_the_lease_until_it_is_idle_for_too_long() -> None:
    lease = RunLease()
    assert lease.holder(5.0) is None and not lease.is_held_by(A) and not lease.is_held_by(None)
    assert not lease.touch(None, 100.0)  # a client without a run, such as a person who reads the status
    assert lease.touch(A, 100.0) and lease.holder(100.0) == "a"
    assert not lease.touch(B, 101.0) and not lease.touch(None, 101.0)
    end = 100.0 + RUN_IDLE_SECONDS
    assert lease.holder(end - 0.1) == "a" and lease.holder(end) is None
    assert not lease.touch(A, end + 1)  # no other run has acquired the lease: the weights are still its own
    assert lease.holder(end + 1) == "a" and lease.is_held_by(A) and not lease.is_held_by(B)


def test_the_first_request_after_expiry_acquires_the_lease() -> None:
    lease = RunLease()
    assert lease.touch(A, 100.0) and lease.touch(B, 100.0 + RUN_IDLE_SECONDS)
    assert not lease.touch(A, 101.0 + RUN_IDLE_SECONDS)
    assert lease.holder(101.0 + RUN_IDLE_SECONDS) == "b" and not lease.is_held_by(A)
    assert lease.touch(A, 100.0 + 2 * RUN_IDLE_SECONDS) and lease.is_held_by(A)


def test_a_released_lease_can_be_acquired_at_once() -> None:
    lease = RunLease()
    assert lease.touch(A, 100.0)
    lease.release(B)
    lease.release(None)
    assert lease.holder(101.0) == "a"
    lease.release(A)
    assert lease.holder(101.0) is None and lease.touch(B, 101.0)


def test_the_name_of_a_run_neither_releases_its_lease_nor_prolongs_it() -> None:
    """The status shows the name, so every client with the key has it."""
    lease, impostor = RunLease(), RunIdentity("a", "guessed")
    assert lease.touch(A, 100.0) and not lease.is_held_by(impostor)
    lease.release(impostor)
    assert lease.holder(101.0) == "a" and "secret" not in repr(A)
    assert not lease.touch(impostor, 100.0 + RUN_IDLE_SECONDS - 1)
    assert lease.holder(100.0 + RUN_IDLE_SECONDS) is None
    assert lease.touch(impostor, 101.0 + RUN_IDLE_SECONDS) and not lease.is_held_by(A)  # as any other run
