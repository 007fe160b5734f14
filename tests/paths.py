"""Paths of the repository; tests take every path from here."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
