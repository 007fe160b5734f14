"""Build a trainer for a model that must be refused, and report the error."""

from __future__ import annotations

from tests.programs.dist.engine_runs import error_of, make_trainer, write_report


def build(out: str, flags: list[str]) -> None:
    write_report(out, {"error": error_of(lambda: make_trainer(flags))})
