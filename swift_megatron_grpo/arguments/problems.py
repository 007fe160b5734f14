"""Collect the problems of several checks, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check and raise one ValueError with all problems."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))  # two checks may report the same problem


@contextmanager
def prefix_problems(subject: str) -> Iterator[None]:
    """Prefix the message of a ValueError with its subject."""
    try:
        yield
    except ValueError as problem:
        raise ValueError(f"{subject}: {problem}") from problem
