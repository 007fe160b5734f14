"""Paths that several benchmarks use."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def absolute(text: str) -> Path:
    """Return the path of an argument, which processes in other folders read too."""
    return Path(text).resolve()
