"""Tables of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def table(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row], without: Sequence[str] = ()) -> str:
    columns = {name: cell for name, cell in columns.items() if name not in without}
    return lines_of([list(columns), *([cell(row) for cell in columns.values()] for row in rows)]) + "\n"


def lines_of(rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first row is its head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])
