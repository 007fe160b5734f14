"""The HTML file of a report: one page that loads nothing from elsewhere, with its data as JSON inside."""

import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.report.contents import MOST_BYTES, contents, load

FILE = "report.html"
_SECONDS = 30.0  # between two reports, at least
_SHARE = 0.01  # of the run's time, at most: a report that takes 1 s is written every 100 s
_SCRIPTS = ("values.js", "charts.js", "sections.js", "completions.js", "main.js")


def write_report(folders: Sequence[Path], target: Path, most_bytes: int = MOST_BYTES) -> None:
    """Write the report of these runs; a reader sees the old file or the new one, never a part."""
    text = page(contents(load(folders, most_bytes), time.strftime("%Y-%m-%d %H:%M:%S")))
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def page(data: dict[str, Any]) -> str:
    filled = {
        "STYLE": asset("style.css"),
        "DATA": embedded(data),
        "SCRIPT": "\n".join(asset(name) for name in _SCRIPTS),
    }
    before, *parts = asset("page.html").split("<!--")  # not one replacement after another: data may hold a mark
    return before + "".join(filled[mark] + rest for mark, _, rest in (part.partition("-->") for part in parts))


def asset(name: str) -> str:
    return files("swift_megatron_grpo.output.report").joinpath("assets", name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in: completions are text of a model, not of this page.

    In JSON these characters occur in strings only, where an escape has the same meaning.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", errors="replace").decode("utf-8")  # without halves of surrogate pairs


class LiveReport:
    """The report of a run while it runs: written again when it is due, and never a reason for the run to end."""

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
                self._warn(f"{self._folder / FILE} cannot be written, and the run continues without it: {error!r}")
            self._has_warned = True
        ended = self._clock()
        self._due = ended + max(_SECONDS, (ended - began) / _SHARE)
