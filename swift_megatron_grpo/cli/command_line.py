"""The parser, the exit codes and the findings of all subcommands."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import partial
from typing import Any, NoReturn

FINE, FOUND, USAGE = 0, 1, 2  # exit codes


class Refused(SystemExit):
    """A subcommand cannot continue. Its text is for the user; Python's exit code for a text is FOUND."""


class Parser(argparse.ArgumentParser):
    """A parser that accepts one spelling of an option, and suggests it for a misspelt one."""

    def __init__(self, prog: str, description: str) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description.strip(), allow_abbrev=False, formatter_class=as_written)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_word(unknown[0].split("=")[0], self._option_string_actions))
        return options

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\nsee {self.prog} --help", file=sys.stderr)
        sys.exit(USAGE)


def unknown_word(word: str, known: Iterable[str]) -> str:
    """Return the sentence about a word that is not one of the known ones."""
    near = get_close_matches(word.replace("-", "_"), [name.replace("-", "_") for name in known], n=1)
    suggestion = next((f"; did you mean {name}?" for name in known if [name.replace("-", "_")] == near), "")
    return f"there is no {word}{suggestion}"


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


ok, note, problem = (partial(Finding, level) for level in Level)


def print_section(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print the findings under a title as they arrive, and return them."""
    print(f"\n{title}")
    printed = []
    for finding in findings:
        print(finding, flush=True)
        printed.append(finding)
    return printed


def print_verdict(findings: Sequence[Finding]) -> int:
    """Print the summary of all findings and return the exit code."""
    problems = [finding.subject for finding in findings if finding.level is Level.PROBLEM]
    notes = sum(finding.level is Level.NOTE for finding in findings)
    print(f"\n{len(problems)} problems, {notes} notes")
    if problems:
        print(f"a run would fail: {', '.join(problems)}")
    return FOUND if problems else FINE
