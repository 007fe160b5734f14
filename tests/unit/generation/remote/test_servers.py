"""Which servers may generate: those whose newest weights have passed their check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swift_megatron_grpo.generation.remote.client import Client
from swift_megatron_grpo.generation.remote.servers import Servers
from tests.unit.arguments.test_server_checks import CONFIG, GYM, status


def servers(number: int) -> Servers:
    """Nobody is asked, so nobody has to be there."""
    found = Servers(replace(CONFIG, urls=tuple(f"http://s{i}" for i in range(number)), group_ports=(0,) * number))
    found.adopt([Client(url, session=None) for url in found.config.urls])  # type: ignore[arg-type]
    for server in found.all:
        server.status = status(instance="first")
    return found


def names(which: list[Any]) -> list[str]:
    return [server.url for server in which]


def test_weights_must_be_trusted_before_they_generate() -> None:
    found = servers(2)
    one, other = found.all
    assert found.without_weights(3) == [one, other] and one.is_new
    one.received(3, collect_checksums=True)
    assert found.with_weights(3) == [one] and found.verified_servers(3) == [] and not one.is_new
    one.verified = True
    other.received(3, collect_checksums=False)
    assert names(found.verified_servers(3)) == ["http://s0"] and other.is_new
    other.invalidate_weights()
    assert found.without_weights(3) == [other] and found.verified_servers(3) == [one]
    one.received(4, collect_checksums=False)  # newer ones are trusted anew
    assert found.verified_servers(4) == [] == found.with_weights(3)


def test_a_server_that_was_started_anew_has_accounted_for_nothing() -> None:
    found = servers(1)
    [server] = found.all
    server.received(3, collect_checksums=True)
    server.verified = True
    found._answered(server, status(instance="second"))
    assert not server.is_out and server.is_new
    assert found.without_weights(3) == [server] and found.verified_servers(3) == []


def test_a_server_that_was_started_otherwise_stays_out() -> None:
    found = servers(1)
    [server] = found.all
    found._answered(server, status(instance="second", conversations=GYM))
    assert server.is_out and "it leads conversations" in server.why_out
    found._answered(server, status(instance="third"))
    assert not server.is_out


def test_a_server_that_another_run_has_joined_is_out_until_that_ends() -> None:
    """Which could happen only while this run was silent, as one that is stopped and continued."""
    found = servers(1)
    [server] = found.all
    server.received(3, collect_checksums=True)
    server.verified = True
    found._answered(server, status(instance="first", run=found.run))
    assert found.verified_servers(3) == [server]
    found._answered(server, status(instance="first", run="a machine, process 7, 1234"))
    assert server.is_out and "it serves another run (a machine, process 7, 1234)" in server.why_out
    found._answered(server, status(instance="first", run=None))
    assert not server.is_out and found.without_weights(3) == [server]  # it has the other run's
