"""Sends tensors from the trainer to the workers of one rollout server. Both ends use it, so it imports torch only.

Each server has a separate process group, built directly from a store: it is independent of both default groups, no
object is pickled, and a server that dies breaks only its own group. Rank 0 is the trainer.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

_TRAINER = 0
_CONNECT = timedelta(seconds=30)  # the store is already listening, unless its process has just been killed
# Groups closed during a transfer. A gloo transfer cannot be interrupted, and destroying its group would wait for it.
_abandoned: list[Any] = []


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address and settings with which the ranks of a group find each other."""

    host: str
    port: int
    size: int
    session: str  # prefix of the group's keys, different from those of earlier groups
    timeout: float  # seconds, for the rendezvous and for every transfer


def listen(host: str, port: int) -> TCPStore:
    """Create the store of a rendezvous, which listens on this address only. Port 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Channel:
    """One rank's end of the group. Every `send` of the trainer needs a `receive` of every worker."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        self.device = device
        timeout = timedelta(seconds=rendezvous.timeout)
        tcp_store = TCPStore(rendezvous.host, rendezvous.port, timeout=min(timeout, _CONNECT), wait_for_workers=False)
        tcp_store.set_timeout(timeout)
        store = PrefixStore(rendezvous.session, tcp_store)
        create = _nccl_group if device.type == "cuda" else _gloo_group
        self._group: Any = create(store, rank, rendezvous, timeout)

    def send(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Send a message; return when every worker has received it. `payload`: bytes, on this device."""
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self.device)
        size = 0 if payload is None else payload.numel()
        self._broadcast(torch.tensor([text.numel(), size], device=self.device))
        self._broadcast(text)
        if payload is not None:
            self._broadcast(payload)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor]:
        """Receive the next message: header and payload."""
        sizes = self._broadcast(torch.empty(2, dtype=torch.int64, device=self.device))
        text_size, payload_size = sizes.tolist()
        text = self._broadcast(torch.empty(text_size, dtype=torch.uint8, device=self.device))
        payload = torch.empty(payload_size, dtype=torch.uint8, device=self.device)
        if payload_size:
            self._broadcast(payload)
        header: dict[str, Any] = json.loads(bytes(text.cpu().numpy()))
        return header, payload

    def close(self) -> None:
        """Close the group. Pending calls of the other end and of other threads here raise an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        group = self._group
        if group is None:
            raise ConnectionError("the channel is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = _TRAINER, 0
        work = group.broadcast([tensor], options)
        delay = 1e-5
        while not work.is_completed():
            if self._group is None:
                _abandoned.append((group, work))
                raise ConnectionError("the channel was closed")
            time.sleep(delay)
            delay = min(2 * delay, 2e-3)
        work.wait()  # raises the error of a failed transfer
        return tensor


def _gloo_group(store: Store, rank: int, rendezvous: Rendezvous, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:  # the local address of a connection to the other machine; loopback if both are the same
        address = _local_address(rendezvous.host, rendezvous.port)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, rendezvous.size, options)


def _nccl_group(store: Store, rank: int, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_wait():
        return ProcessGroupNCCL(store, rank, rendezvous.size, options)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Make wait() of groups built inside the context raise if a peer is gone.

    Otherwise NCCL's watchdog kills this process. The trainer's other groups are not affected.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _local_address(host: str, port: int) -> str:
    with socket.create_connection((host, port)) as connection:
        address: str = connection.getsockname()[0]
    return address
