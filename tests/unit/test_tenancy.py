"""Whose weights a rollout server has."""

from __future__ import annotations

from swift_megatron_grpo.server.tenancy import Tenancy


def test_a_run_is_served_while_it_is_heard_of() -> None:
    tenancy = Tenancy()
    assert tenancy.served(0.0) is None and not tenancy.belongs_to("a") and not tenancy.belongs_to(None)
    tenancy.admit("a", 100.0)
    tenancy.hear("b", 105.0)  # who only looks
    tenancy.hear(None, 105.0)
    assert tenancy.served(109.0) == "a" and tenancy.served(110.0) is None
    tenancy.hear("a", 120.0)  # it was silent, and nobody came
    assert tenancy.served(129.0) == "a" and tenancy.belongs_to("a") and not tenancy.belongs_to("b")


def test_who_joins_after_a_run_has_ended_has_the_server() -> None:
    tenancy = Tenancy()
    tenancy.admit("a", 100.0)
    tenancy.admit("b", 200.0)
    tenancy.hear("a", 205.0)
    assert tenancy.served(209.0) == "b" and not tenancy.belongs_to("a") and tenancy.served(210.0) is None
