"""Run GPU tests and record their outcomes, with the commit, the device and the versions they ran with.

    python -m benchmarks.gpu_tests --json tests.json layouts residency      # tests/gpu/test_layouts.py and another one
    python -m benchmarks.gpu_tests --json benchmarks/h200/parts/tests.json --add tests.json

The file is written after every test, so an early end loses only the test that ran. A skipped test leaves the record of
an earlier run. What follows -- goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench import machine, revision

STACK = ("torch", "transformer-engine", "megatron-core", "mcore-bridge", "ms-swift", "vllm")


class Recorder:
    """A plugin of pytest that records the outcome of every test."""

    def __init__(self, file: Path) -> None:
        device, versions = machine(revision(), STACK)
        self._file = file
        self._origin = {
            "device": device,
            "gpus": torch.cuda.device_count(),
            "version": versions["swift-megatron-grpo"],
            "stack": ", ".join(f"{package} {versions[package]}" for package in STACK if package in versions),
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that has run, or whose fixtures have failed."""
        if report.when == "call" or report.outcome == "failed":
            add(self._file, [{"test": report.nodeid, "outcome": report.outcome, **self._origin}])


def add(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace the records of these tests in the file, or append them, in alphabetical order."""
    known = json.loads(file.read_text())["tests"] if file.exists() else []
    by_test = {record["test"]: record for record in [*known, *records] if record["outcome"] != "skipped"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"tests": [by_test[name] for name in sorted(by_test)]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of tests/gpu, without test_ and .py")
    parser.add_argument("--json", type=Path, required=True, help="file for the outcomes")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files whose outcomes to add, without any test")
    own, of_pytest = _split(sys.argv[1:])
    args = parser.parse_args(own)
    for file in args.add:
        add(args.json, json.loads(file.read_text())["tests"])
    if not args.names:
        return 0
    files = [f"tests/gpu/test_{name}.py" for name in args.names]
    plugins = [Recorder(args.json.resolve())]
    return int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *files, *of_pytest], plugins=plugins))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
