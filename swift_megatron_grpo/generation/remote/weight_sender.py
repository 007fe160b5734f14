"""Sends trained weights in buckets, by a thread for each server; the next bucket is exported while one is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple

import torch

from swift_megatron_grpo.weights.transport.buckets import NamedWeights, buckets
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

_IN_FLIGHT = 1  # buckets queued behind the one being sent


@dataclass(frozen=True)
class WeightSender:
    """The sending side of weight transfers: rank 0 of the run, and gateways."""

    device: torch.device
    bucket_bytes: int

    def join(self, rendezvous: Rendezvous) -> WeightConnection:
        return WeightConnection(Channel(rendezvous, rank=0, device=self.device))

    def send(
        self, weights: NamedWeights, connections: Sequence[WeightConnection], adapter: dict[str, Any] | None = None
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
            packed = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
            for connection in connections:
                connection.put(Message(bucket.header, bucket.data, packed))
        return [connection.finish(Message({"end": True, "adapter": adapter})) for connection in connections]


class Message(NamedTuple):
    """A bucket, or the end of a transfer. The thread that sends it waits for the event after which it is packed."""

    header: dict[str, Any]
    data: torch.Tensor | None = None  # None: it ends the transfer
    packed: torch.cuda.Event | None = None


class WeightConnection:
    """The channel to one server, with a thread per transfer that sends on it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: Queue[Message] = Queue(_IN_FLIGHT)
        self._failure: Exception | None = None
        self._thread: Thread | None = None

    def begin(self) -> None:
        self._failure = None
        self._thread = Thread(target=self._send, name="weights", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def finish(self, end: Message) -> Exception | None:
        assert self._thread is not None
        self._messages.put(end)
        self._thread.join()
        return self._failure

    def close(self) -> None:
        """Close the channel, from any thread. A transfer in progress fails."""
        self._channel.close()

    def _send(self) -> None:
        """Send until the end of the transfer. After a failure, drain the queue without sending."""
        device = self._channel.device
        if device.type == "cuda":  # a stream of this thread: sends do not wait for weights that are exported meanwhile
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))
        while True:
            message = self._messages.get()
            try:
                if self._failure is None:
                    if message.packed is not None:
                        message.packed.wait()
                    self._channel.send(message.header, message.data)
            except Exception as error:
                self._failure = error
            if message.data is None:
                return
