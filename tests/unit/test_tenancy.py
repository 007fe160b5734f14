"""Whose weights a rollout server has."""

from __future__ import annotations

from swift_megatron_grpo.server.tenancy import Tenancy


def test_a_run_is_served_while_it_is_heard_of() -> None:
    tenancy = Tenancy()
    assert tenancy.served(5.0) is None and not tenancy.belongs_to("a") and not tenancy.belongs_to(None)
    assert not tenancy.hear(None, 100.0)  # a person looks
    assert tenancy.hear("a", 100.0) and tenancy.served(100.0) == "a"
    assert not tenancy.hear("b", 105.0) and not tenancy.hear(None, 105.0)
    assert tenancy.served(109.0) == "a" and tenancy.served(110.0) is None
    assert not tenancy.hear("a", 120.0)  # it was silent, and nobody came: the weights are still its own
    assert tenancy.served(129.0) == "a" and tenancy.belongs_to("a") and not tenancy.belongs_to("b")


def test_who_asks_after_a_run_has_ended_has_the_server() -> None:
    tenancy = Tenancy()
    assert tenancy.hear("a", 100.0) and tenancy.hear("b", 200.0)
    assert not tenancy.hear("a", 205.0)
    assert tenancy.served(209.0) == "b" and not tenancy.belongs_to("a")
    assert tenancy.hear("a", 210.0) and tenancy.belongs_to("a")


def test_who_leaves_is_not_waited_for() -> None:
    tenancy = Tenancy()
    assert tenancy.hear("a", 100.0)
    tenancy.leave("b")
    tenancy.leave(None)
    assert tenancy.served(101.0) == "a"
    tenancy.leave("a")
    assert tenancy.served(101.0) is None and tenancy.hear("b", 101.0)
