"""Sending of trained weights to rollout servers, in buckets; the next bucket is exported while one is sent.

Each server has its own connection with its own thread, so that a slow or dead server does not delay the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple

import torch

from swift_megatron_grpo.weights.transport.buckets import Bucket, NamedWeights, buckets
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

_IN_FLIGHT = 1  # buckets queued behind the one being sent


@dataclass(frozen=True)
class WeightSender:
    """The sending side of weight transfers: rank 0 of the run."""

    device: torch.device
    bucket_bytes: int

    def join(self, rendezvous: dict[str, Any]) -> WeightConnection:
        return WeightConnection(Channel(Rendezvous(**rendezvous), rank=0, device=self.device))

    def send(
        self,
        weights: NamedWeights,
        connections: Sequence[WeightConnection],
        adapter: dict[str, Any] | None = None,
    ) -> list[Exception | None]:
        """Send weights over all connections. Return the failure of each connection, or None.

        Consumes all weights in any case, because exporting them is collective over ranks.
        """
        if not connections:
            for _ in weights:
                pass
            return []
        for connection in connections:
            connection.begin()
        for bucket in buckets(weights, self.bucket_bytes, self.device):
            packed = Packed(bucket, self._event())
            for connection in connections:
                connection.put(packed)
        return [connection.finish({"end": True, "adapter": adapter}) for connection in connections]

    def _event(self) -> torch.cuda.Event | None:
        """Return the event that everything so far precedes; None: nothing runs after this call returns."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


class Packed(NamedTuple):
    """A bucket that is packed once its event has happened. The thread that sends it waits, the one that exports not."""

    bucket: Bucket
    event: torch.cuda.Event | None


class WeightConnection:
    """The channel to one server, with a thread per transfer that sends on it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buckets: Queue[Packed | dict[str, Any]] = Queue(_IN_FLIGHT)
        self._failure: Exception | None = None
        self._thread: Thread | None = None

    def begin(self) -> None:
        self._failure = None
        self._thread = Thread(target=self._send, name="weights", daemon=True)
        self._thread.start()

    def put(self, packed: Packed) -> None:
        self._buckets.put(packed)

    def finish(self, end: dict[str, Any]) -> Exception | None:
        assert self._thread is not None
        self._buckets.put(end)
        self._thread.join()
        return self._failure

    def close(self) -> None:
        """Close the channel, from any thread. A transfer in progress fails."""
        self._channel.close()

    def _send(self) -> None:
        """Send until the end of the transfer. After a failure, drain the queue without sending."""
        with self._own_stream():
            self._send_all()

    def _own_stream(self) -> AbstractContextManager[Any]:
        """Return a context that keeps sends from waiting for weights that are exported meanwhile."""
        device = self._channel.device
        if device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(device)
        return torch.cuda.stream(torch.cuda.Stream(device))

    def _send_all(self) -> None:
        while True:
            item = self._buckets.get()
            if self._failure is None:
                try:
                    if isinstance(item, Packed):
                        if item.event is not None:
                            item.event.wait()
                        self._channel.send(item.bucket.header, item.bucket.data)
                    else:
                        self._channel.send(item)
                except Exception as error:
                    self._failure = error
            if not isinstance(item, Packed):
                return
