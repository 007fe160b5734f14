"""Check packages and machine before a run.

    python -m swift_megatron_grpo.cli.doctor                 takes about a minute
    python -m swift_megatron_grpo.cli.doctor --no-imports    a few seconds

Exit code 1: a run would fail. Attach the output to a report of a fault.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from swift_megatron_grpo import SWITCH, __version__
from swift_megatron_grpo.cli.doctor.finding import Finding, Level
from swift_megatron_grpo.cli.doctor.machine import check_machine
from swift_megatron_grpo.cli.doctor.packages import check_packages
from swift_megatron_grpo.cli.doctor.probes import check_imports, no_imports, probe_torch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swift_megatron_grpo.cli.doctor",
        description="Check packages and machine before a run; exit code 1 means that a run would fail.",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("megatron_output"), help="that of the run")
    parser.add_argument("--no-imports", action="store_true", help="do not import what a rank imports")
    options = parser.parse_args(arguments)

    switch = os.environ.get(SWITCH, "on")
    print(f"swift_megatron_grpo {__version__}, Python {platform.python_version()}, {SWITCH}={switch}")
    facts = probe_torch()
    findings = print_all("machine", check_machine(facts, options.output_dir, os.environ))
    findings += print_all("packages", check_packages(facts.available, facts.hopper))
    findings += print_all("imports", [no_imports() if options.no_imports else check_imports()])
    return verdict(findings)


def print_all(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print one part of the report as its findings arrive."""
    print(f"\n{title}")
    printed = []
    for finding in findings:
        print(finding, flush=True)
        printed.append(finding)
    return printed


def verdict(findings: Sequence[Finding]) -> int:
    """Print the summary and return the exit code."""
    problems = [finding.subject for finding in findings if finding.level is Level.PROBLEM]
    notes = sum(finding.level is Level.NOTE for finding in findings)
    print(f"\n{len(problems)} problems, {notes} notes")
    if problems:
        print(f"a run would fail: {', '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
