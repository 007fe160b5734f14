"""Weights from several machines: the first rank of each, a gateway, sends to its share of the servers.

Rank 0 alone contacts servers. What they answer, an address and a secret, it passes on to their gateways, over the run's
own process group. A transfer that ends early, because its server is lost or receives no more, rank 0 ends by a key in
the run's store, which the gateway watches while it sends. A server to which its gateway cannot connect gets weights
from rank 0. On one machine there are no gateways.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count
from threading import Event, Thread
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import psutil
from swift.utils import get_logger
from torch.distributed import PrefixStore, Store

from swift_megatron_grpo.generation.remote.weight_sender import WeightConnection, WeightSender
from swift_megatron_grpo.runtime.failures import Ranks
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

T = TypeVar("T")
logger = get_logger()
Orders = dict[int, Rendezvous | None]  # the connections that a gateway sends on; those with a rendezvous are new
Failures = dict[int, str]  # by connection
_WATCH_SECONDS = 0.1
_PREFIX = "swift_megatron_grpo/weights"


class ExchangingRanks(Ranks, Protocol):
    """The exchange of values between some ranks, without the others."""

    def exchange(self, outgoing: Mapping[int, T], senders: Sequence[int]) -> dict[int, T]: ...


@dataclass(frozen=True, slots=True)
class GatewayConnection:
    """Rank 0's handle of a connection that a gateway has."""

    gateway: int
    number: int  # unique in the run
    store: Store

    def close(self) -> None:
        """Let the gateway close it: at once during a transfer, else before the next one."""
        with suppress(RuntimeError):  # the store has ended, and all ranks end with it
            self.store.set(str(self.number), "closed")


class Gateways:
    """The gateways of a run, as rank 0 directs them."""

    def __init__(self, ranks: ExchangingRanks, store: Store, of_server: Mapping[str, int]) -> None:
        """`of_server`: the rank that sends to each server, by its URL."""
        self.of_server = of_server
        self._ranks, self._store = ranks, PrefixStore(_PREFIX, store)
        self._others = sorted({*of_server.values()} - {0})
        self._numbers = count()

    def begin(
        self, connections: Sequence[GatewayConnection], joining: Mapping[str, Rendezvous]
    ) -> dict[str, GatewayConnection | str]:
        """Begin a transfer over connections and to servers that expect a gateway, by URL.

        Return a connection to each of those, or why its gateway cannot connect to it.
        """
        orders: dict[int, Orders] = {rank: {} for rank in self._others}
        new = {url: GatewayConnection(self.of_server[url], next(self._numbers), self._store) for url in joining}
        for connection in connections:
            orders[connection.gateway][connection.number] = None
        for url, connection in new.items():
            orders[connection.gateway][connection.number] = joining[url]
        self._ranks.exchange(orders, [])
        failures = self._failures()
        return {url: failures.get(connection.number, connection) for url, connection in new.items()}

    def end(self, connections: Sequence[GatewayConnection]) -> list[tuple[GatewayConnection, Exception]]:
        """Wait until gateways have sent over these connections; return the failures."""
        failures = self._failures()
        return [(one, ConnectionError(failures[one.number])) for one in connections if one.number in failures]

    def _failures(self) -> Failures:
        reported: dict[int, Failures] = self._ranks.exchange({}, self._others)
        return {
            number: f"rank {rank}: {reason}"
            for rank, failures in reported.items()
            for number, reason in failures.items()
        }


class Gateway:
    """The first rank of a machine, which sends to the servers that rank 0 assigns to it."""

    def __init__(self, ranks: ExchangingRanks, sender: WeightSender, store: Store) -> None:
        self._ranks, self._sender, self._store = ranks, sender, PrefixStore(_PREFIX, store)
        self._connections: dict[int, WeightConnection] = {}

    def send(self, weights: NamedWeights, adapter: dict[str, Any] | None) -> None:
        """Send weights over the connections that rank 0 names, after joining new ones. Report failures of both."""
        orders: Orders = self._ranks.exchange({}, [0])[0]
        self._close_dropped()
        failures = self._join({number: one for number, one in orders.items() if one is not None})
        self._ranks.exchange({0: failures}, [])
        sending = {number: one for number, one in self._connections.items() if number in orders}
        with self._closing_dropped():
            results = self._sender.send(weights, list(sending.values()), adapter)
        failures = {number: "the connection is closed" for number in orders if number not in sending}
        for (number, connection), failure in zip(sending.items(), results, strict=True):
            if failure is not None:
                failures[number] = f"{type(failure).__name__}: {failure}"
                connection.close()  # so that the server stops receiving
                self._connections.pop(number, None)
        self._ranks.exchange({0: failures}, [])

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _join(self, joining: Mapping[int, Rendezvous]) -> Failures:
        began, failures = time.monotonic(), Failures()
        for number, rendezvous in joining.items():
            try:
                if time.monotonic() - began > rendezvous.seconds_to_form:  # for the one before
                    raise TimeoutError("the server has stopped waiting")
                self._connections[number] = self._sender.join(rendezvous)
            except (RuntimeError, OSError) as failure:  # of torch's groups, and of sockets
                failures[number] = f"{type(failure).__name__}: {failure}"
        return failures

    @contextmanager
    def _closing_dropped(self) -> Iterator[None]:
        """Close connections that rank 0 drops, until this block is left."""
        ended = Event()

        def watch() -> None:
            while not ended.wait(_WATCH_SECONDS):
                self._close_dropped()

        thread = Thread(target=watch, name="dropped connections", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _close_dropped(self) -> None:
        for number in list(self._connections):
            if self._store.check([str(number)]):
                self._connections.pop(number).close()


def find_gateways(
    ranks: ExchangingRanks, urls: Sequence[str], sender: WeightSender, is_first: bool, connect: Callable[[], Store]
) -> Gateways | Gateway | None:
    """Assign servers to the first ranks of machines. Every rank calls it; None: this one sends no other's weights.

    `connect` returns a connection to the run's store that nothing else uses.
    """
    places = ranks.all_gather([_place(url) for url in urls] if is_first or ranks.rank == 0 else None)
    of_server = dict(zip(urls, assign({rank: of_rank for rank, of_rank in enumerate(places) if of_rank}), strict=True))
    others = {*of_server.values()} - {0}
    if ranks.rank == 0 and others:
        listed = ", ".join(f"{url} from rank {rank}" for url, rank in of_server.items())
        logger.info(f"rollout servers get weights from the first ranks of machines: {listed}")
        return Gateways(ranks, connect(), of_server)
    return Gateway(ranks, sender, connect()) if ranks.rank in others else None


Place = Literal["loopback", "this machine", "elsewhere"]


def assign(places: Mapping[int, Sequence[Place]]) -> list[int]:
    """Return the gateway of each server. `places`: where each gateway, rank 0 among them, finds each server.

    A server belongs to a gateway of its machine, otherwise to any; of those to the one that has the fewest. Rank 0
    reaches all: what it finds on loopback is on its machine, and other machines find something else there.
    """
    near: list[list[int]] = []
    for server, of_first in enumerate(places[0]):
        on_machine = [rank for rank, of_rank in places.items() if of_rank[server] != "elsewhere"]
        near.append([0] if of_first == "loopback" else on_machine)
    servers_of = Counter[int]()
    chosen: dict[int, int] = {}
    for server in sorted(range(len(near)), key=lambda server: not near[server]):  # those that have no choice first
        chosen[server] = min(near[server] or places, key=lambda rank: (servers_of[rank], rank))
        servers_of[chosen[server]] += 1
    return [chosen[server] for server in range(len(near))]


def _place(url: str) -> Place:
    """Return where this machine finds a server."""
    try:
        infos = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return "elsewhere"  # its name means nothing here
    found = {str(address[0]) for *_, address in infos}
    if any(ip_address(one).is_loopback or ip_address(one).is_unspecified for one in found):
        return "loopback"
    own = {address.address for of_interface in psutil.net_if_addrs().values() for address in of_interface}
    return "this machine" if found & own else "elsewhere"
