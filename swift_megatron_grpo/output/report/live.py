"""The report of a run while it runs: written again when it is due, and never a reason for the run to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from swift_megatron_grpo.output.report.page import write_report

FILE = "report.html"
_SECONDS = 30.0  # between two reports, at least
_SHARE = 0.01  # of the run's time, at most: a report that takes 1 s is written every 100 s


class LiveReport:
    """Writes report.html into the folder of a run."""

    def __init__(
        self, folder: Path, warn: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._due = float("-inf")
        self._has_warned = False

    def update(self, now: bool = False) -> None:
        """Write the report if it is due, or `now`. A failure is logged once, and the next attempt comes when due."""
        began = self._clock()
        if began < self._due and not now:
            return
        try:
            write_report([self._folder], self._folder / FILE)
        except Exception as error:  # also a fault of the report itself: the run is worth more
            if not self._has_warned:
                self._warn(f"{self._folder / FILE} cannot be written, and the run goes on without it: {error!r}")
            self._has_warned = True
        ended = self._clock()
        self._due = ended + max(_SECONDS, (ended - began) / _SHARE)
