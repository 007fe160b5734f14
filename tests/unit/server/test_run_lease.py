"""Whose weights a rollout server has."""

from __future__ import annotations

from swift_megatron_grpo.protocol.messages import SILENCE
from swift_megatron_grpo.server.run_lease import Tenancy


def test_a_run_is_served_while_it_is_heard_of() -> None:
    tenancy = Tenancy()
    assert tenancy.served(5.0) is None and not tenancy.belongs_to("a") and not tenancy.belongs_to(None)
    assert not tenancy.hear(None, 100.0)  # a person looks
    assert tenancy.hear("a", 100.0) and tenancy.served(100.0) == "a"
    assert not tenancy.hear("b", 101.0) and not tenancy.hear(None, 101.0)
    end = 100.0 + SILENCE
    assert tenancy.served(end - 0.1) == "a" and tenancy.served(end) is None
    assert not tenancy.hear("a", end + 1)  # it was silent, and nobody came: the weights are still its own
    assert tenancy.served(end + 1) == "a" and tenancy.belongs_to("a") and not tenancy.belongs_to("b")


def test_who_asks_after_a_run_has_ended_has_the_server() -> None:
    tenancy = Tenancy()
    assert tenancy.hear("a", 100.0) and tenancy.hear("b", 100.0 + SILENCE)
    assert not tenancy.hear("a", 101.0 + SILENCE)
    assert tenancy.served(101.0 + SILENCE) == "b" and not tenancy.belongs_to("a")
    assert tenancy.hear("a", 100.0 + 2 * SILENCE) and tenancy.belongs_to("a")


def test_who_leaves_is_not_waited_for() -> None:
    tenancy = Tenancy()
    assert tenancy.hear("a", 100.0)
    tenancy.leave("b")
    tenancy.leave(None)
    assert tenancy.served(101.0) == "a"
    tenancy.leave("a")
    assert tenancy.served(101.0) is None and tenancy.hear("b", 101.0)
