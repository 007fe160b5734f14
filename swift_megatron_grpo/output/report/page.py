"""The HTML file of a report: one page that loads nothing from elsewhere, with its data as JSON inside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.report.contents import MOST_BYTES, contents, load

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
    """Return the HTML of a page with this data."""
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
