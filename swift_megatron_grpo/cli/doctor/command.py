"""Check the packages and the machine before a run.

swift-megatron-grpo doctor                   takes about a minute
swift-megatron-grpo doctor --skip_imports    takes a few seconds

The exit code is 1 if a run would fail. Attach the output to a bug report.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from swift_megatron_grpo import SWITCH, __version__
from swift_megatron_grpo.cli.command_line import note, print_section, print_verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir", type=Path, default=Path("megatron_output"), help="that of the run; default: megatron_output"
    )
    parser.add_argument("--skip_imports", action="store_true", help="do not import what a rank imports")


def run(options: argparse.Namespace) -> int:
    from swift_megatron_grpo.cli.doctor.machine import check_imports, check_machine, probe_torch
    from swift_megatron_grpo.cli.doctor.packages import check_packages

    switch = os.environ.get(SWITCH, "on")
    print(f"swift_megatron_grpo {__version__}, Python {platform.python_version()}, {SWITCH}={switch}")
    facts = probe_torch()
    findings = print_section("machine", check_machine(facts, options.output_dir, os.environ))
    findings += print_section("packages", check_packages(facts.available, facts.hopper))
    skipped = note("imports of a rank", "not tried", "run it without --skip_imports, which takes 20 to 60 s")
    findings += print_section("imports", [skipped if options.skip_imports else check_imports()])
    return print_verdict(findings)
