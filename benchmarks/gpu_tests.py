"""Run GPU tests and record their outcomes, with the date, the commit, the device and the versions they ran with.

    python -m benchmarks.gpu_tests --json tests.json layouts residency      # tests/gpu/test_layouts.py and another one
    python -m benchmarks.gpu_tests --json benchmarks/h200/parts/tests.json --add tests.json

The file is written before and after every test. A test that begins is recorded as "started" until it has an outcome:
what still has that outcome has crashed, or reached a limit of time, and taken the process with it. A skipped test gets
back the record of an earlier run. --add keeps the newer record of a test; one without a date is older than any other.
What follows -- goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench import machine, revision
from benchmarks.harness.paths import absolute

STACK = ("torch", "transformer-engine", "megatron-core", "mcore-bridge", "ms-swift", "vllm")
Record = dict[str, Any]


class Recorder:
    """A plugin of pytest that records the outcome of every test."""

    def __init__(self, file: Path) -> None:
        device, versions = machine(revision(), STACK)
        self._file = file
        self._earlier: dict[str, Record] = {}
        self._origin = {
            "device": device,
            "gpus": torch.cuda.device_count(),
            "version": versions["swift-megatron-grpo"],
            "stack": ", ".join(f"{package} {versions[package]}" for package in STACK if package in versions),
        }

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Replace the record of an earlier run, which would otherwise stay if this one crashed."""
        records = read(self._file)
        if nodeid in records:
            self._earlier[nodeid] = records[nodeid]
        self._record(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that has run, or whose fixtures have failed."""
        if report.outcome == "skipped":
            self._restore(report.nodeid)
        elif report.when == "call" or report.outcome == "failed":
            self._record(report.nodeid, report.outcome)

    def _record(self, test: str, outcome: str) -> None:
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        write(self._file, read(self._file) | {test: {"test": test, "outcome": outcome, "date": date, **self._origin}})

    def _restore(self, test: str) -> None:
        others = {name: record for name, record in read(self._file).items() if name != test}
        write(self._file, others | ({test: self._earlier[test]} if test in self._earlier else {}))


def read(file: Path) -> dict[str, Record]:
    """Return the records by test."""
    return {record["test"]: record for record in json.loads(file.read_text())["tests"]} if file.exists() else {}


def write(file: Path, records: Mapping[str, Record]) -> None:
    """Write the records in alphabetical order of their tests."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"tests": [records[name] for name in sorted(records)]}, indent=1) + "\n")


def add(file: Path, records: Iterable[Record]) -> list[str]:
    """Replace the records of these tests in the file, or append them. Return the tests whose record there is newer."""
    by_test, newer = read(file), []
    for record in records:
        test = record["test"]
        if test in by_test and by_test[test].get("date", "") > record.get("date", ""):
            newer.append(test)
        else:
            by_test[test] = record
    write(file, by_test)
    return newer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of tests/gpu, without test_ and .py")
    parser.add_argument("--json", type=absolute, required=True, help="file for the outcomes")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files whose outcomes to add, without any test")
    own, of_pytest = _split(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(own)
    if not args.names and not args.add:
        parser.error("there is nothing to do: name files of tests/gpu to run, or files of outcomes with --add")
    if of_pytest and not args.names:
        parser.error(f"{' '.join(of_pytest)} would go to pytest, but no test is named")
    if missing := [str(file) for file in args.add if not file.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    for file in args.add:
        for test in add(args.json, read(file).values()):
            print(f"{args.json} has a newer record of {test} than {file}, and keeps it")
    if not args.names:
        return 0
    files = [f"tests/gpu/test_{name}.py" for name in args.names]
    plugins = [Recorder(args.json)]
    return int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *files, *of_pytest], plugins=plugins))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
