"""Trained weights to rollout servers: packed into buckets, and while one travels the next is exported.

Each server has a line of its own, a thread that sends, so that a slow or dead one holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Any

import torch

from swift_megatron_grpo.protocol.buckets import Bucket, buckets
from swift_megatron_grpo.protocol.channel import Channel, Rendezvous

_IN_FLIGHT = 1  # buckets that wait for one that travels


@dataclass(frozen=True)
class WeightSender:
    device: torch.device
    bucket_bytes: int

    def join(self, rendezvous: dict[str, Any]) -> WeightConnection:
        return WeightConnection(Channel(Rendezvous(**rendezvous), rank=0, device=self.device))

    def send(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        lines: Sequence[WeightConnection],
        adapter: dict[str, Any] | None = None,
    ) -> list[Exception | None]:
        """What went wrong on each line. Goes through all weights in any case: other ranks export with this one."""
        if not lines:
            for _ in weights:
                pass
            return []
        for line in lines:
            line.begin()
        for bucket in buckets(weights, self.bucket_bytes, self.device):
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # the lines' threads have streams of their own
            for line in lines:
                line.put(bucket)
        return [line.finish({"end": True, "adapter": adapter}) for line in lines]


class WeightConnection:
    """One server's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buckets: Queue[Bucket | dict[str, Any]] = Queue(_IN_FLIGHT)
        self._failure: Exception | None = None
        self._thread: Thread | None = None

    def begin(self) -> None:
        self._failure = None
        self._thread = Thread(target=self._send, name="weights", daemon=True)
        self._thread.start()

    def put(self, bucket: Bucket) -> None:
        self._buckets.put(bucket)

    def finish(self, end: dict[str, Any]) -> Exception | None:
        assert self._thread is not None
        self._buckets.put(end)
        self._thread.join()
        return self._failure

    def close(self) -> None:
        """From any thread. What is being sent fails."""
        self._channel.close()

    def _send(self) -> None:
        """After a failure it takes what comes and sends no more."""
        if self._channel.device.type == "cuda":
            torch.cuda.set_device(self._channel.device)
        while True:
            next_one = self._buckets.get()
            if self._failure is None:
                try:
                    if isinstance(next_one, Bucket):
                        self._channel.send(next_one.header, next_one.data)
                    else:
                        self._channel.send(next_one)
                except Exception as error:
                    self._failure = error
            if not isinstance(next_one, Bucket):
                return
