"""Run the members as processes of the machines of a job: Slurm or Kubernetes starts the same command on each of them.

The first machines have the ranks, the next ones the servers. A store on machine 0, next to torchrun's, gives the
addresses of the servers to the ranks, and tells every machine how the others have ended. Everyone may write to a store
of torch, so what is in it is signed with the key of the servers, together with random values of this job.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_FILE_VARIABLE, read_api_key
from swift_megatron_grpo.launch.child import Child
from swift_megatron_grpo.launch.commands import rollout, torchrun, url_of
from swift_megatron_grpo.launch.devices import take, visible_devices
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.start import variables_of_run
from swift_megatron_grpo.launch.supervision import End, StopRequest, Supervision

_STORE_SECONDS = 300.0  # for all machines to start
_LOOK_SECONDS = 1.0
_TRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_GONE_SECONDS = 60.0  # of a store that does not answer, after which a machine of servers ends
_LAST_SECONDS = 10.0  # that machine 0 waits with its store for the others, which look at it every second


@dataclass(frozen=True, slots=True)
class Site:
    """This machine among those of the job."""

    machine: int
    machines: int
    address: str  # of machine 0
    port: int  # of torchrun's store; ours is the next one


def site_of(environ: Mapping[str, str]) -> Site | None:
    """Return the place of this machine by torchrun's variables, or Slurm's or Kubernetes' own; None: it is alone."""
    machines = _first(environ, "NNODES", "SLURM_NNODES") or "1"
    machine = _first(environ, "NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX") or "0"
    port = environ.get("MASTER_PORT") or "29500"
    if machines == "1":
        return None
    if not (machines.isdecimal() and machine.isdecimal() and int(machine) < int(machines)):
        raise Refused(f"NNODES={machines} and NODE_RANK={machine}: number the {machines} machines from 0 (NODE_RANK)")
    if not environ.get("MASTER_ADDR"):
        raise Refused("MASTER_ADDR is not set: it is the name of machine 0, on all machines (docs/multi_node.md)")
    if not (port.isdecimal() and 0 < int(port) < 2**16 - 1):
        raise Refused(f"MASTER_PORT={port} is not a port with a next one; use MASTER_PORT=29500")
    return Site(int(machine), int(machines), environ["MASTER_ADDR"], int(port))


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def servers_of_machines(roles: Roles, machines: int, gpus: int | None) -> list[range]:
    """Return the numbers of the servers of each machine. `gpus`: of one machine; None: they compute on CPUs."""
    if roles.machines > machines:
        raise Refused(f"nnodes {roles.machines} is more than the {machines} machines of the job; start it on as many")
    order = [*range(roles.machines, machines), *range(roles.machines)]  # those with ranks last
    found, left = [range(0)] * machines, range(roles.servers)
    for machine in order:
        free = None if gpus is None else gpus - (roles.ranks_of_machine if machine < roles.machines else 0)
        if free is not None and free < 0:
            raise Refused(f"train: machines have {gpus} GPUs, and {roles.ranks_of_machine} ranks each; use more nnodes")
        room = -(-roles.servers // max(1, machines - roles.machines)) if free is None else free // roles.gpus_of_server
        found[machine], left = left[:room], left[room:]
    if left:
        raise Refused(f"rollout: {len(left)} of {roles.servers} servers find no GPUs; add machines or use less")
    idle = next((machine for machine in order if machine >= roles.machines and not found[machine]), None)
    if idle is not None:
        raise Refused(f"machine {idle} has neither ranks nor servers; set nnodes: {machines}, or start fewer machines")
    return found


def run_on_machines(roles: Roles, site: Site, environ: Mapping[str, str]) -> End:
    """Run the part of this machine until the run ends everywhere."""
    if roles.servers and read_api_key(environ) is None:
        raise Refused(
            f"servers on several machines need a key: set {API_KEY_FILE_VARIABLE} to a file that only you can read, "
            "on all machines"
        )
    if roles.max_failures:
        raise Refused("max_failures needs Ray on several machines; leave it out: the cluster starts a job again")
    devices = visible_devices(environ)
    numbers = servers_of_machines(roles, site.machines, None if devices is None else len(devices))[site.machine]
    stop, key = StopRequest(), read_api_key(environ) or ""
    try:
        others = _Others(site, range(roles.machines), roles.servers, key, lambda: stop.number is not None)
        supervision = _start(roles, site, others, numbers, list(devices or ()), environ)
    except (RuntimeError, OSError) as error:  # of the store
        if stop.number is not None:
            return End(128 + stop.number)
        raise Refused(
            f"machine 0 ({site.address}), or another one of the job, does not answer at port {site.port + 1}, the one "
            f"after MASTER_PORT; start the same command on all machines, and open the port between them: {error}"
        ) from None
    end = supervision.until_end(stop)
    others.leave(end)
    return end


def _start(
    roles: Roles, site: Site, others: _Others, numbers: range, left: list[str], environ: Mapping[str, str]
) -> Supervision:
    """Start the servers of this machine. Its ranks start once the addresses of all servers are known."""
    variables, folder = variables_of_run(environ), os.getcwd()
    has_ranks = site.machine < roles.machines
    of_ranks = {**environ, **take(left, roles.ranks_of_machine if has_ranks else 0)}
    servers = []
    for number in numbers:
        server = Child(f"rollout server {number}", others.host, {**environ, **take(left, roles.gpus_of_server)})
        host, port = server.place()
        server.start(rollout(roles.server_flags, host, port), variables, folder, f"{url_of(host, port)}/health")
        others.say(f"server/{number}", url_of(host, port))
        servers.append(server)
    if not has_ranks:
        return Supervision([], servers, roles.trainer_flags, others.end)
    ranks = Child(f"machine {site.machine}", others.host, of_ranks)

    def start_or_end() -> End | None:
        urls = others.urls
        if urls is not None and not ranks.has_started:
            flags = roles.trainer_flags + (("--vllm_server_base_url", *urls) if urls else ())
            words = torchrun(flags, roles.ranks_of_machine, roles.machines, site.machine, site.address, site.port)
            ranks.start(words, variables, folder, None)
        return others.end()

    return Supervision([ranks], servers, roles.trainer_flags, start_or_end)


class _Others:
    """The other machines of the job."""

    def __init__(
        self, site: Site, with_ranks: range, servers: int, key: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until machine 0 and all machines with ranks are there, or until `is_stopped`, which raises."""
        self._site, self._ranks, self._servers, self._key = site, with_ranks, servers, key.encode()
        self._limit, self._is_stopped = time.monotonic() + _STORE_SECONDS, is_stopped
        if site.machine == 0:
            self._store: Any = self._open()
        # the address of this machine that machine 0 reaches
        self.host: str = self._waited(self._reached)
        if site.machine != 0:
            self._store = self._open()
        # without a key, all can sign
        self._nonces = [self._nonce_of(machine) for machine in with_ranks] if key else []
        self.urls: tuple[str, ...] | None = None if servers else ()  # of all servers, once they are known
        self._end: End | None = None
        self._leaves = threading.Event()
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()

    def _open(self) -> Any:
        limit, is_first = timedelta(seconds=_STORE_SECONDS), self._site.machine == 0
        return dist.TCPStore(self._site.address, self._site.port + 1, None, is_first, limit, wait_for_workers=False)

    def _reached(self) -> str | None:
        place = self._site.address, self._site.port + 1
        with suppress(OSError), socket.create_connection(place, _CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
        return None

    def _waited(self, look: Callable[[], str | None]) -> str:
        """Return what `look` finds. A wait inside the store would hear no signal before its end."""
        while (found := look()) is None:
            if self._is_stopped():
                raise RuntimeError("stopped")
            if time.monotonic() > self._limit:
                raise RuntimeError(f"waited {_STORE_SECONDS:g} s")
            time.sleep(_TRY_SECONDS)
        return found

    def _nonce_of(self, machine: int) -> str:
        """Return the random value of a machine with ranks, which reads addresses: here its own, not what the store has.

        What an earlier job has signed lacks it, whatever a stranger writes.
        """
        name = f"nonce/{machine}"
        if machine != self._site.machine:
            return self._waited(
                lambda: self._store.get(name).decode(errors="replace") if self._store.check([name]) else None
            )
        nonce = secrets.token_hex(16)
        self._store.set(name, nonce)
        return nonce

    def _listen(self) -> None:
        """Look for the servers, and for the ends of other machines.

        A thread, because a store whose link is cut answers nothing.
        """
        has_ranks = self._site.machine in self._ranks
        while self._end is None and not self._leaves.is_set():
            with suppress(RuntimeError, ValueError):  # it answers no more
                ends = dict(self._ends())
                self._heard = time.monotonic()
                failed = next((end for end in ends.values() if end.code), None)
                if failed is not None:
                    self._end = failed
                elif not has_ranks and all(machine in ends for machine in self._ranks):
                    self._end = End(0)
                elif has_ranks and self.urls is None:
                    self._find_servers()
            if not has_ranks and time.monotonic() - self._heard > _GONE_SECONDS:
                self._end = End(1, f"machine 0 ({self._site.address}) does not answer; its servers here are ended")
            self._leaves.wait(_LOOK_SECONDS)

    def _find_servers(self) -> None:
        missing = [number for number in range(self._servers) if not self._store.check([f"server/{number}"])]
        if missing:
            if time.monotonic() > self._limit:
                self._end = End(
                    1, f"rollout server {missing[0]} has no address {_STORE_SECONDS:g} s after the start of this "
                    f"machine; start the same command on all machines, and open port {self._site.port + 1} of machine "
                    f"0 ({self._site.address}) between them"
                )  # fmt: skip
            return
        urls = [self.heard(f"server/{number}") for number in range(self._servers)]
        if None in urls:
            self._end = End(
                1, f"the address of rollout server {urls.index(None)} in the store of machine 0 is not signed with "
                f"the key of this machine; set {API_KEY_FILE_VARIABLE} to the same key on all machines"
            )  # fmt: skip
        else:
            self.urls = tuple(map(str, urls))

    def say(self, name: str, text: str) -> None:
        """Write a text to the store, signed."""
        self._store.set(name, f"{self._signature(name, text)} {text}")

    def heard(self, name: str) -> str | None:
        """Return the text of this name, which is there; None if another key has signed it, or none."""
        signature, _, text = self._store.get(name).decode(errors="replace").partition(" ")
        is_ours = hmac.compare_digest(signature.encode(), self._signature(name, text).encode())
        return text if is_ours else None

    def _signature(self, name: str, text: str) -> str:
        return hmac.new(self._key, json.dumps([*self._nonces, name, text]).encode(), "sha256").hexdigest()

    def _ends(self) -> Iterator[tuple[int, End]]:
        for machine in range(self._site.machines):
            if machine == self._site.machine or not self._store.check([f"end/{machine}"]):
                continue
            if (text := self.heard(f"end/{machine}")) is not None:
                code, line = json.loads(text)
                yield machine, End(code, f"machine {machine}: {line}" if line else "")

    def end(self) -> End | None:
        """Return the end of the run if another machine has caused it, or if its ranks have ended."""
        return self._end

    def leave(self, end: End) -> None:
        """Tell the others; machine 0, which has the store, waits for them."""
        self._leaves.set()  # the thread looks no more at a store that is about to close
        with suppress(RuntimeError):
            self.say(f"end/{self._site.machine}", json.dumps([end.code, end.line]))
            limit = time.monotonic() + _LAST_SECONDS
            while self._site.machine == 0 and time.monotonic() < limit:
                if len(dict(self._ends())) == self._site.machines - 1:
                    break
                time.sleep(_LOOK_SECONDS)
