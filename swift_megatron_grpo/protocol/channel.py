"""Sends tensors from the trainer to the workers of one rollout server. Both ends use it, so it imports torch only.

Each server has a separate process group, built directly from a store: it is independent of both default groups, no
object is pickled, and a server that dies breaks only its own group. Rank 0 is the trainer. Only processes with the
secret of rendezvous.py take part: they prove it at the rendezvous, and once more over the group itself.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

from swift_megatron_grpo.protocol.rendezvous import Rendezvous, authenticate, shared_store

_TRAINER = 0
_PROOF_BYTES = 32
# Groups closed during a transfer. A gloo transfer cannot be interrupted, and destroying its group would wait for it.
_abandoned: list[Any] = []


class Channel:
    """One rank's end of the group. Every `send` of the trainer needs a `receive` of every worker."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        self.device = device
        self._rank, self._size = rank, rendezvous.size
        timeout = timedelta(seconds=rendezvous.timeout)
        with shared_store(rendezvous) as (store, address):
            self._group: Any = (
                _nccl_group(store, rank, rendezvous.size, timeout)
                if device.type == "cuda"
                else _gloo_group(store, rank, rendezvous.size, timeout, address)
            )
            try:
                self._check_members(rendezvous.secret.encode())
            except BaseException:
                self.close()
                raise

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

    def _check_members(self, secret: bytes) -> None:
        """Raise ConnectionError unless every rank of the group proves that it has the secret.

        The rendezvous has checked the ranks that exchanged addresses there; the group's own connections, which gloo
        and NCCL open, authenticate nobody.
        """
        nonces = b"".join(self._from_each_rank(secrets.token_bytes(_PROOF_BYTES)))
        own = authenticate(secret, b"rank %d" % self._rank, nonces)
        for rank, proof in enumerate(self._from_each_rank(own)):
            if not hmac.compare_digest(proof, authenticate(secret, b"rank %d" % rank, nonces)):
                raise ConnectionError(f"rank {rank} of the weight group does not have the secret of the rendezvous")

    def _from_each_rank(self, own: bytes) -> list[bytes]:
        """Return the 32 bytes that each rank contributes."""
        received = []
        for rank in range(self._size):
            data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
            received.append(bytes(self._broadcast(data, rank).cpu().numpy()))
        return received

    def _broadcast(self, tensor: torch.Tensor, root: int = _TRAINER) -> torch.Tensor:
        group = self._group
        if group is None:
            raise ConnectionError("the channel is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = group.broadcast([tensor], options)
        began = time.monotonic()
        while not work.is_completed():
            if self._group is None:
                _abandoned.append((group, work))
                raise ConnectionError("the channel was closed")
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 8, 1e-5), 2e-3))  # a bucket takes 2 ms between GPUs
        work.wait()  # raises the error of a failed transfer
        return tensor


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> ProcessGroupGloo:
    """Create a group whose connections use this local address, unless GLOO_SOCKET_IFNAME selects an interface."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_wait():
        return ProcessGroupNCCL(store, rank, size, options)


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
