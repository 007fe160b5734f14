"""A trace of some steps (--trace_steps): the phases of all ranks, and the requests of servers, on one time line.

The file is in the format of Chrome's tracing, which https://ui.perfetto.dev and chrome://tracing open. Times are those
of each machine's clock, so machines must be synchronised.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swift_megatron_grpo.generation.interface import AnsweredRequest
from swift_megatron_grpo.output.disk.files import write_durably
from swift_megatron_grpo.runtime.parallel import Coordinator

logger = logging.getLogger(__name__)
FILE = "trace.json"


class Span(NamedTuple):
    """Something that took time on one line of a process."""

    name: str
    start: float  # seconds since 1970
    seconds: float


class RankSpans(NamedTuple):
    """Everything that one rank recorded in a step."""

    rank: int
    host: str
    spans: list[Span]
    requests: list[AnsweredRequest]  # of servers; on the rank that sends them


@dataclass
class Trace:
    """Records this rank in the traced steps. Rank 0 writes the spans of all ranks after each of these steps."""

    steps: tuple[int, int] | None  # the first and the last; None: nothing is traced
    folder: Path
    coordinator: Coordinator
    answered: Callable[[], list[AnsweredRequest]]  # requests of servers since the last call
    spans: list[Span] | None = None  # of the step in progress, if it is traced
    ranks: list[RankSpans] = field(default_factory=list)  # of all traced steps, on rank 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step, if it is one of those that are traced. Every rank enters and leaves it."""
        if self.steps is None or not self.steps[0] <= number <= self.steps[1]:
            yield
            return
        if number == self.steps[0]:
            self.answered()  # drop the requests of earlier steps
        self.spans = spans = list[Span]()
        try:
            with self.phase(f"step {number}"):
                yield
        finally:
            self.spans = None
        recorded = RankSpans(self.coordinator.rank, socket.gethostname(), spans, self.answered())
        gathered = self.coordinator.all_gather(recorded)
        if self.coordinator.rank == 0:
            self.ranks += gathered
            path = self.folder / FILE
            try:
                write_durably(path, [json.dumps({"traceEvents": events(self.ranks)})])
            except OSError as error:
                logger.warning(f"--trace_steps: {path} cannot be written, and the run continues without it: {error}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        spans = self.spans
        start = time.time()
        began = time.perf_counter()
        try:
            yield
        finally:
            if spans is not None:
                spans.append(Span(name, start, time.perf_counter() - began))


def events(ranks: Sequence[RankSpans]) -> list[dict[str, Any]]:
    """Return the events of a trace: a process for each rank and each server, in microseconds from the first span."""
    requests = [request for one in ranks for request in one.requests]
    starts = [span.start for one in ranks for span in one.spans] + [request.start for request in requests]
    origin = min(starts, default=0.0)
    names = {one.rank: f"rank {one.rank}, {one.host}" for one in ranks}
    result = [_event(span, "phase", one.rank, 0, origin) for one in ranks for span in one.spans]
    for process, server in enumerate(sorted({request.server for request in requests}), max(names, default=-1) + 1):
        names[process] = f"server {server}"
        for lane, request in lanes(request for request in requests if request.server == server):
            span = Span("completion", request.start, request.seconds)
            result.append(_event(span, "request", process, lane, origin))
    named = [{"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
             for process, name in names.items()]  # fmt: skip
    return [*named, *result]


def lanes(requests: Iterable[AnsweredRequest]) -> list[tuple[int, AnsweredRequest]]:
    """Put requests that overlap in time on different lines, as few as possible."""
    free_at: list[float] = []
    placed = []
    for request in sorted(requests, key=lambda request: request.start):
        lane = next((i for i, end in enumerate(free_at) if end <= request.start), len(free_at))
        free_at[lane : lane + 1] = [request.start + request.seconds]
        placed.append((lane, request))
    return placed


def _event(span: Span, category: str, process: int, line: int, origin: float) -> dict[str, Any]:
    return {"name": span.name, "cat": category, "ph": "X", "pid": process, "tid": line,
            "ts": round((span.start - origin) * 1e6, 1), "dur": round(span.seconds * 1e6, 1)}  # fmt: skip
