"""The time that each phase of a step takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class PhaseTimer:
    """Sums the seconds of every `with timer("generation"): ...`; a phase may be entered several times."""

    def __init__(self, around: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self._around = around  # entered with each phase: the watchdog
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._around(phase):
                yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
