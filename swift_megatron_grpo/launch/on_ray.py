"""Run the members as actors of Ray, in a placement group: one actor for the ranks of a machine, one for each server.

A bundle has the GPUs of its actor, so Ray chooses the machines and the devices. An actor does no more than start its
command, watch it and report; its output is that of the command, so Ray's log files, its dashboard and the terminal show
it under the name of the actor. ms-swift's own layer is not used: its workers are one actor per rank of a trainer that
is driven from outside, and it waits for ever for GPUs that a cluster does not have.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swift_megatron_grpo.launch.capacity import refuse_too_few
from swift_megatron_grpo.launch.child import Child
from swift_megatron_grpo.launch.member import State
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.start import start, variables_of_restarts, variables_of_run
from swift_megatron_grpo.launch.supervision import End, StopRequest, Supervision, run, say

_STORE_BYTES = 100 * 2**20  # of a Ray that is started here: nothing of a run is in its object store
_CONNECT_SECONDS = 10.0
_PLACED_SECONDS = 0.5
_NAMED_SECONDS = 10.0  # until a line says that the run waits for bundles
_ANSWER_SECONDS = 0.1
_KILL_SECONDS = 10.0
_LOG_SECONDS = 1.5  # for the last lines of the actors to arrive


def run_on_ray(roles: Roles, environ: Mapping[str, str], device: str) -> End:
    """Run these roles on the cluster of RAY_ADDRESS, on the one that runs here, or on this machine alone.

    `device`: GPU or CPU. Every rank needs one.
    """
    _connect(environ)
    refuse_too_few(roles, device, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    stop, starts = StopRequest(), count(1)
    variables, again = variables_of_run(environ), variables_of_restarts(roles)
    groups: list[PlacementGroup] = []

    def begin(resumes: bool) -> Supervision:
        while groups:
            remove_placement_group(groups.pop())
        groups.append(placed(roles, device, stop))
        name = "-".join(filter(None, (roles.name, f"start{next(starts)}" if resumes else "")))
        ranks, servers = actors(roles, groups[0], device, name)
        if resumes:
            return start(roles.resumed(), ranks, servers, {**variables, **again})
        return start(roles, ranks, servers, variables)

    try:
        return run(begin, roles.max_failures, stop)
    except RayError as error:
        return End(1, f"Ray has failed: {type(error).__name__}: {str(error).strip()}")
    finally:
        time.sleep(_LOG_SECONDS)
        ray.shutdown()


def _connect(environ: Mapping[str, str]) -> None:
    address = environ.get("RAY_ADDRESS", "auto")
    _refuse_unreachable(address)
    # The actors import this package from where this process does; a variable here is shown by the dashboard.
    runtime = {"env_vars": {"PYTHONPATH": environ["PYTHONPATH"]}} if "PYTHONPATH" in environ else None
    if address != "local":
        try:
            ray.init(address=address, runtime_env=runtime)
            return
        except ConnectionError:  # no cluster runs on this machine
            if address != "auto":
                raise
    ray.init(address="local", object_store_memory=_STORE_BYTES, runtime_env=runtime)


def _refuse_unreachable(address: str) -> None:
    """Refuse an address at which nothing listens, at which Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise Refused(
            f"RAY_ADDRESS={address} is not the address of a cluster; use HOST:6379 on one of its machines, or "
            "RAY_ADDRESS=auto in a job of `ray job submit`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise Refused(
            f"RAY_ADDRESS={address}: nothing answers there ({error}); start one with `ray start --head`, or unset "
            "RAY_ADDRESS to use this machine alone"
        ) from None


def placed(roles: Roles, device: str, stop: StopRequest) -> PlacementGroup:
    """Return a placement group with a bundle for each member, those of the ranks first.

    One group: Ray then gives a run all of it or nothing, and two runs never wait for each other with half of theirs.
    """
    sizes = [roles.ranks_of_machine] * roles.machines + [roles.gpus_of_server] * roles.servers
    group = placement_group([_bundle(size, device) for size in sizes], strategy="PACK")
    began, is_named = time.monotonic(), False
    while not group.wait(_PLACED_SECONDS):
        if stop.number is not None:
            raise SystemExit(128 + stop.number)
        if not is_named and time.monotonic() - began > _NAMED_SECONDS:
            is_named = True
            free = ray.available_resources().get(device, 0)
            say(f"waits for {sum(sizes)} {device}s, of which {free:g} are free in the cluster. Ctrl-C ends the wait")
    return group


def _bundle(size: int, device: str) -> dict[str, float]:
    return {"CPU": 1, "GPU": size} if device == "GPU" else {"CPU": size}


def actors(roles: Roles, group: PlacementGroup, device: str, name: str) -> tuple[list[_Actor], list[_Actor]]:
    """Return the actors of the ranks and of the servers, which all start at the same time."""
    prefix = f"{name}-" if name else ""

    def actor(kind: type[Child], size: int, bundle: int, number: int) -> _Actor:
        resources = _bundle(size, device)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(kind)
        of_ray = f"{prefix}{_NAMES[kind]}-{number}"
        handle = remote.options(name=of_ray, scheduling_strategy=strategy).remote()
        return _Actor(f"{_CALLED[kind]} {number}", handle)

    ranks = [actor(Ranks, roles.ranks_of_machine, number, number) for number in range(roles.machines)]
    return ranks, [
        actor(RolloutServer, roles.gpus_of_server, roles.machines + number, number) for number in range(roles.servers)
    ]


def _own() -> dict[str, str]:
    """Return the variables of an actor but for one that Ray sets to the number of its CPUs."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


class Ranks(Child):
    """The actor of the ranks of a machine. Ray shows its name before their lines."""

    def __init__(self) -> None:
        super().__init__("ranks", ray.util.get_node_ip_address(), _own())


class RolloutServer(Child):
    """The actor of a rollout server. Ray shows its name before the lines of the server."""

    def __init__(self) -> None:
        super().__init__("server", ray.util.get_node_ip_address(), _own())


_NAMES = {Ranks: "ranks", RolloutServer: "server"}  # of the actors
_CALLED = {Ranks: "machine", RolloutServer: "rollout server"}  # in lines for the user


class _Actor:
    """A member that is an actor."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name, self._handle = name, handle
        self._host = ""
        self._state, self._asked = State(), None

    @property
    def name(self) -> str:
        return f"{self._name} ({self._host})" if self._host else self._name

    def place(self) -> tuple[str, int]:
        try:
            place: tuple[str, int] = ray.get(self._handle.place.remote())
        except RayActorError as error:
            raise Refused(
                f"{self.name}: its actor cannot start; all machines of the cluster need this version of this package: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from None
        self._host = place[0]
        return place

    def start(self, words: Sequence[str], environ: Mapping[str, str], folder: str, health: str | None) -> None:
        try:
            ray.get(self._handle.start.remote(words, environ, folder, health))
        except RayTaskError as error:
            raise Refused(f"{self.name}: {error.cause}") from None

    def state(self) -> State:
        """Return the newest state that has arrived."""
        if self._state.is_lost:
            return self._state
        self._asked = self._asked or self._handle.state.remote()
        ready, _ = ray.wait([self._asked], timeout=_ANSWER_SECONDS)
        if ready:
            self._asked = None
            try:
                self._state = ray.get(ready[0])
            except RayActorError as error:
                why = str(error).strip().splitlines()[0]
                self._state = State(said=f"its actor is gone: {why}", is_lost=True)
        return self._state

    def stop(self) -> None:
        self._handle.stop.remote()

    def kill(self) -> None:
        with suppress(RayActorError, GetTimeoutError):
            ray.get(self._handle.kill.remote(), timeout=_KILL_SECONDS)
        ray.kill(self._handle)
