"""The record of GPU tests: what a run adds to it, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.gpu_tests import Recorder, add


def outcomes(file: Path) -> dict[str, str]:
    return {record["test"]: record["outcome"] for record in json.loads(file.read_text())["tests"]}


def report(test: str, outcome: Literal["passed", "failed", "skipped"], when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_a_run_records_what_it_ran_and_failed_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    recorder = Recorder(tmp_path / "parts" / "tests.json")
    for when in ("setup", "call", "teardown"):
        recorder.pytest_runtest_logreport(report("b", "passed", when))
    recorder.pytest_runtest_logreport(report("a", "failed"))
    recorder.pytest_runtest_logreport(report("c", "failed", "setup"))
    recorder.pytest_runtest_logreport(report("d", "skipped", "setup"))
    file = tmp_path / "parts" / "tests.json"
    assert outcomes(file) == {"a": "failed", "b": "passed", "c": "failed"}
    assert list(outcomes(file)) == ["a", "b", "c"]
    [first, *_] = json.loads(file.read_text())["tests"]
    assert first["version"] == "abc1234" and "megatron-core 0." in first["stack"] and first["device"]


def test_a_later_run_replaces_what_it_ran_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "tests.json"
    before: list[dict[str, Any]] = [{"test": name, "outcome": "failed", "version": "old"} for name in ("a", "b")]
    add(file, before)
    add(file, [{"test": "b", "outcome": "passed", "version": "new"}, {"test": "a", "outcome": "skipped"}])
    assert json.loads(file.read_text())["tests"] == [before[0], {"test": "b", "outcome": "passed", "version": "new"}]
