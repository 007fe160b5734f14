"""A trace of some steps (--trace_steps): the phases of all ranks, and the requests of servers, on one time line.

The file is in the format of Chrome's tracing, which https://ui.perfetto.dev and chrome://tracing open. Times are those
of each machine's clock, so machines must be synchronised.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.generation.interface import AnsweredRequest
from swift_megatron_grpo.runtime.parallel import Coordinator

logger = logging.getLogger(__name__)
FILE = "trace.json"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one line of a process."""

    name: str
    start: float  # seconds since 1970
    seconds: float


@dataclass(frozen=True, slots=True)
class RankSpans:
    """Everything that one rank recorded in a step."""

    rank: int
    host: str
    spans: list[Span]
    requests: list[AnsweredRequest]  # of servers; on the rank that sends them


class Trace:
    """Records this rank in the traced steps. Rank 0 writes the spans of all ranks after each of these steps."""

    def __init__(
        self,
        steps: tuple[int, int] | None,  # the first and the last; None: nothing is traced
        folder: Path,
        coordinator: Coordinator,
        answered: Callable[[], list[AnsweredRequest]],  # requests of servers since the last call
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._coordinator = coordinator
        self._answered = answered
        self._spans: list[Span] | None = None  # of the step in progress, if it is traced
        self._ranks: list[RankSpans] = []  # of all traced steps, on rank 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step, if it is one of those that are traced. Every rank enters and leaves it."""
        if self._steps is None or not self._steps[0] <= number <= self._steps[1]:
            yield
            return
        if number == self._steps[0]:
            self._answered()  # drop the requests of earlier steps
        spans: list[Span] = []
        self._spans = spans
        try:
            with self.phase(f"step {number}"):
                yield
        finally:
            self._spans = None
        recorded = RankSpans(self._coordinator.rank, socket.gethostname(), spans, self._answered())
        gathered = self._coordinator.all_gather(recorded)
        if self._coordinator.rank == 0:
            self._ranks += gathered
            self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._spans is None:
            yield
            return
        spans = self._spans
        start = time.time()
        began = time.perf_counter()
        try:
            yield
        finally:
            spans.append(Span(name, start, time.perf_counter() - began))

    def _write(self) -> None:
        path = self._folder / FILE
        part = path.with_name(f".{FILE}.part")
        try:
            part.write_text(json.dumps({"traceEvents": events(self._ranks)}), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            logger.warning(f"--trace_steps: {path} cannot be written, and the run continues without it: {error}")


def events(ranks: Sequence[RankSpans]) -> list[dict[str, Any]]:
    """Return the events of a trace: a process for each rank and each server, in microseconds from the first span."""
    starts = [span.start for one in ranks for span in one.spans]
    starts += [request.start for one in ranks for request in one.requests]
    origin = min(starts, default=0.0)
    result: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for one in ranks:
        names[one.rank] = f"rank {one.rank}, {one.host}"
        result += [_event(span.name, "phase", one.rank, 0, span.start - origin, span.seconds) for span in one.spans]
    servers = sorted({request.server for one in ranks for request in one.requests})
    for process, server in enumerate(servers, start=max(names, default=-1) + 1):
        names[process] = f"server {server}"
        requests = [request for one in ranks for request in one.requests if request.server == server]
        for lane, request in lanes(requests):
            start = request.start - origin
            result.append(_event("completion", "request", process, lane, start, request.seconds))
    return [*(_name(process, name) for process, name in names.items()), *result]


def lanes(requests: Iterable[AnsweredRequest]) -> list[tuple[int, AnsweredRequest]]:
    """Put requests that overlap in time on different lines, as few as possible."""
    free_at: list[float] = []
    placed = []
    for request in sorted(requests, key=lambda request: request.start):
        lane = next((i for i, end in enumerate(free_at) if end <= request.start), len(free_at))
        free_at[lane : lane + 1] = [request.start + request.seconds]
        placed.append((lane, request))
    return placed


def _event(name: str, category: str, process: int, line: int, start: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": line,
            "ts": round(start * 1e6, 1), "dur": round(seconds * 1e6, 1)}  # fmt: skip


def _name(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
