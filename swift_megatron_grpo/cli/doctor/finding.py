"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "FAILS"  # a run would fail


@dataclass(frozen=True)
class Finding:
    """A checked subject, its state, and for a note or a problem the advice."""

    level: Level
    subject: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"  {self.level.value:5}  {self.subject:20} {self.found}"
        return f"{line}\n{'':29}-> {self.advice}" if self.advice else line


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def note(subject: str, found: str, advice: str) -> Finding:
    return Finding(Level.NOTE, subject, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    return Finding(Level.PROBLEM, subject, found, advice)
