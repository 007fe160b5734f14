"""Sends tensors from the trainer to the workers of one rollout server. Both ends use it, so it imports torch only.

Each server has a separate process group, built directly from a store: it is independent of both default groups, no
object is pickled, and a server that dies breaks only its own group. Rank 0 is the trainer. Only processes with the
secret of rendezvous.py take part: they prove it at the rendezvous, and again over the group itself. vLLM's own transfer
of weights is not used because it has no such proof.
"""

import hmac
import json
import os
import secrets
import time
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous, authenticate, shared_store

_TRAINER = 0
_PROOF_BYTES = 32
_SIZES = Struct("<qq")  # bytes of a message's header and of its payload
_FRAME_BYTES = 2**15  # sizes and header, which has 90 bytes for each tensor; the rest of a longer header follows
_TEXT_IN_FRAME = _FRAME_BYTES - _SIZES.size
# Groups closed during a transfer. A gloo transfer cannot be interrupted, and destroying its group would wait for it.
_abandoned: list[Any] = []


class Channel:
    """One rank's end of the group. Every `send` of the trainer needs a `receive` of every worker."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        self.device = device
        self._rank = rank
        self._size = rendezvous.size
        forming = timedelta(seconds=rendezvous.seconds_to_form)
        with shared_store(rendezvous) as (store, address):
            if device.type == "cuda":
                self._group: Any = _nccl_group(store, rank, rendezvous.size, forming)
            else:
                self._group = _gloo_group(store, rank, rendezvous.size, forming, address)
            try:
                self._check_members(rendezvous.secret.encode())
                self._group._set_default_timeout(timedelta(seconds=rendezvous.timeout))
            except BaseException:
                self.close()
                raise

    def send(self, header: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Send a message; return when every worker has received it. `payload`: bytes, on this device."""
        text = json.dumps(header).encode()
        frame = bytearray(_FRAME_BYTES)
        rest = text[_TEXT_IN_FRAME:]
        _SIZES.pack_into(frame, 0, len(text), 0 if payload is None else payload.numel())
        frame[_SIZES.size : _SIZES.size + len(text) - len(rest)] = text[:_TEXT_IN_FRAME]
        parts = [self._on_device(part) for part in (frame, bytearray(rest)) if part]
        if payload is not None:
            parts.append(payload)
        for work in [self._start(part) for part in parts]:  # the workers wait in between, to learn the next size
            self._finish(work)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor]:
        """Receive the next message: header and payload."""
        frame = bytes(self._broadcast(self._empty(_FRAME_BYTES)).cpu().numpy())
        text_size, payload_size = _SIZES.unpack_from(frame)
        text = frame[_SIZES.size : _SIZES.size + text_size]
        if text_size > _TEXT_IN_FRAME:
            text += bytes(self._broadcast(self._empty(text_size - _TEXT_IN_FRAME)).cpu().numpy())
        payload = self._empty(payload_size)
        if payload_size:
            self._broadcast(payload)
        header: dict[str, Any] = json.loads(text)
        return header, payload

    def close(self) -> None:
        """Close the group. Pending calls of the other end and of other threads here raise an error."""
        group = self._group
        self._group = None
        if group is not None:
            group.abort()

    def _check_members(self, secret: bytes) -> None:
        """Raise ConnectionError unless every rank proves that it has the secret: gloo and NCCL authenticate nobody."""
        nonces = b"".join(self._from_each_rank(secrets.token_bytes(_PROOF_BYTES)))
        own = authenticate(secret, b"rank %d" % self._rank, nonces)
        for rank, proof in enumerate(self._from_each_rank(own)):
            if not hmac.compare_digest(proof, authenticate(secret, b"rank %d" % rank, nonces)):
                raise ConnectionError(f"rank {rank} of the weight group does not have the secret of the rendezvous")

    def _from_each_rank(self, own: bytes) -> list[bytes]:
        """Return the 32 bytes that each rank contributes."""
        parts = [self._broadcast(self._on_device(bytearray(own)), rank) for rank in range(self._size)]
        return [bytes(part.cpu().numpy()) for part in parts]

    def _broadcast(self, tensor: torch.Tensor, root: int = _TRAINER) -> torch.Tensor:
        self._finish(self._start(tensor, root))
        return tensor

    def _start(self, tensor: torch.Tensor, root: int = _TRAINER) -> Any:
        """Start to send or receive a tensor, after those before it."""
        group = self._group
        if group is None:
            raise ConnectionError("the channel is closed")
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return group, group.broadcast([tensor], options)

    def _finish(self, started: Any) -> None:
        group, work = started
        began = time.monotonic()
        while not work.is_completed():
            if self._group is None:
                _abandoned.append((group, work))
                raise ConnectionError("the channel was closed")
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 16, 1e-5), 2e-3))  # a bucket takes 2 ms between GPUs
        work.wait()  # raises the error of a failed transfer

    def _on_device(self, data: bytearray) -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).to(self.device)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> ProcessGroupGloo:
    """Create a group whose connections use this local address, or the interfaces that GLOO_SOCKET_IFNAME names."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [ProcessGroupGloo.create_device(interface=name) for name in named.split(",")]
    else:
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a group whose wait() raises if a peer is gone. Otherwise NCCL's watchdog would kill this process."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    name = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is created; the trainer's other groups keep theirs
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
