"""The servers that may generate are those whose newest weights have passed their check."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from swift_megatron_grpo.generation.remote.client import Client
from swift_megatron_grpo.generation.remote.servers import Servers
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from tests.unit.arguments.test_server_checks import CONFIG, GYM, status


def make_servers(number: int) -> Servers:
    """Create present servers that are never contacted."""
    servers = Servers(replace(CONFIG, urls=tuple(f"http://s{i}" for i in range(number)), group_ports=(0,) * number))
    servers.adopt([Client(url, session=None) for url in servers.config.urls])  # type: ignore[arg-type]
    for server in servers.all:
        server.status = status(instance="first")
    return servers


def urls(servers: list[Any]) -> list[str]:
    return [server.url for server in servers]


def test_weights_must_be_verified_before_they_generate() -> None:
    servers = make_servers(2)
    one, other = servers.all
    assert servers.without_weights(3) == [one, other] and one.is_new
    one.received(3, collect_checksums=True)
    assert servers.with_weights(3) == [one] and servers.verified_servers(3) == [] and not one.is_new
    one.verified_version = 3
    other.received(3, collect_checksums=False)
    assert urls(servers.verified_servers(3)) == ["http://s0"] and other.is_new
    other.invalidate_weights()
    assert servers.without_weights(3) == [other] and servers.verified_servers(3) == [one]
    one.received(4, collect_checksums=False)  # newer weights must be verified again
    assert servers.verified_servers(4) == [] == servers.with_weights(3)


def test_a_server_generates_while_weights_in_flight_are_checked() -> None:
    servers = make_servers(1)
    servers.config = replace(servers.config, updates_in_flight=True)
    [server] = servers.all
    server.received(3, collect_checksums=True)
    assert servers.generating_from(3) == []
    server.verified_version = 3
    server.received(4, collect_checksums=False, in_flight=True)
    assert servers.generating_from(3) == [server] and not server.verified and servers.verified_servers(4) == []
    server.invalidate_weights()  # the check has failed
    assert servers.generating_from(3) == [] and servers.without_weights(4) == [server]


def test_a_restarted_server_needs_weights_and_a_checksummed_load() -> None:
    servers = make_servers(1)
    [server] = servers.all
    server.received(3, collect_checksums=True)
    server.verified_version = 3
    servers._handle_status(server, status(instance="second"))
    assert not server.is_lost and server.is_new
    assert servers.without_weights(3) == [server] and servers.verified_servers(3) == []


def test_a_server_restarted_with_incompatible_flags_is_not_used() -> None:
    servers = make_servers(1)
    [server] = servers.all
    servers._handle_status(server, status(instance="second", conversations=GYM))
    assert server.is_lost and "it runs multi-turn conversations" in server.loss_reason
    servers._handle_status(server, status(instance="third"))
    assert not server.is_lost


def test_a_server_restarted_with_other_conversations_is_not_used() -> None:
    """A run may leave all of their flags to its servers."""
    servers = make_servers(1)
    servers.config = replace(servers.config, turns=RemoteTurnsConfig(None))
    servers.at_start = {"http://s0": status(conversations=GYM)}
    [server] = servers.all
    for changes in ({"use_gym_env": False}, {"max_turns": 5}, {"answers_groups": True}):
        servers._handle_status(server, status(instance=str(changes), conversations=replace(GYM, **changes)))
        assert server.is_lost and "different multi-turn flags" in server.loss_reason
    foreign: Any = {"of another": "version"}
    servers._handle_status(server, status(instance="newer", protocol=-1, conversations=foreign))
    assert server.is_lost and "another protocol version" in server.loss_reason
    servers._handle_status(server, status(instance="as before", conversations=GYM))
    assert not server.is_lost


def test_a_server_whose_polling_fails_is_lost_and_polled_again() -> None:
    """An unforeseen failure ended the polling of a server, whose state then never changed again."""

    class Client:
        url, responses = "http://s0", [status(instance="first"), RuntimeError("a bug"), status(instance="first")]

        async def status(self, timeout: float) -> Any:
            response = self.responses.pop(0)
            if isinstance(response, Exception):
                raise response
            return response

        def cancel_requests(self) -> None: ...

    async def scenario() -> None:
        servers = Servers(CONFIG)
        servers.adopt([Client()])  # type: ignore[list-item]
        [server] = servers.all
        polling = asyncio.create_task(servers._poll(server))
        losses = []
        while Client.responses:
            await asyncio.sleep(0.05)
            losses += [server.loss_reason] if server.is_lost else []
        assert "polling it failed: RuntimeError: a bug" in losses
        await asyncio.sleep(0.1)
        assert not server.is_lost and not polling.done()
        polling.cancel()

    asyncio.run(scenario())


def test_a_server_leased_by_another_run_is_lost_until_that_run_ends() -> None:
    """Another run can acquire the lease only if this one has sent no requests for a while, for example when stopped."""
    servers = make_servers(1)
    [server] = servers.all
    server.received(3, collect_checksums=True)
    server.verified_version = 3
    servers._handle_status(server, status(instance="first", run=servers.run.name))
    assert servers.verified_servers(3) == [server]
    servers._handle_status(server, status(instance="first", run="a machine, process 7, 1234"))
    assert server.is_lost and "it serves another run (a machine, process 7, 1234)" in server.loss_reason
    servers._handle_status(server, status(instance="first", run=None))
    assert not server.is_lost and servers.without_weights(3) == [server]  # it has the other run's weights
