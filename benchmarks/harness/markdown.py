"""Tables of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def table(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row], without: Sequence[str] = ()) -> str:
    columns = {name: cell for name, cell in columns.items() if name not in without}
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
