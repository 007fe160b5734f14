"""The record of GPU tests: what a run adds to it, and what it leaves."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.gpu_tests import Recorder, _split, add, main
from tests.paths import REPOSITORY

Outcome = Literal["passed", "failed", "skipped"]
# One test of each end that a test can have.
TESTS = """
import pytest

@pytest.fixture
def broken_end():
    yield
    raise RuntimeError

@pytest.fixture
def broken_beginning():
    raise RuntimeError

def test_passes(): pass
def test_fails(): assert False
def test_teardown(broken_end): pass
def test_setup(broken_beginning): pass
@pytest.mark.skip
def test_skipped(): pass
def test_skips(): pytest.skip("nothing to run on")
"""


def records(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["tests"]
    return found


def outcomes(file: Path) -> dict[str, str]:
    return {record["test"]: record["outcome"] for record in records(file)}


def report(test: str, outcome: Outcome, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_every_recorded_test_exists() -> None:
    for record in records(REPOSITORY / "benchmarks" / "h200" / "parts" / "tests.json"):
        file, _, test = record["test"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text(), record["test"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "parts" / "tests.json"


@pytest.fixture
def recorder(file: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("COMMIT", "abc1234")
    return Recorder(file)


def test_every_end_of_a_test_is_recorded(
    recorder: Recorder, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_ends.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    before = {"test": "test_ends.py::test_skips", "outcome": "failed", "version": "old"}
    add(file, [before])
    began = datetime.now(UTC).replace(microsecond=0)
    assert pytest.main(["-p", "no:cacheprovider", "-q", "--rootdir", ".", "test_ends.py"], plugins=[recorder]) == 1
    assert outcomes(file) == {
        "test_ends.py::test_fails": "failed",
        "test_ends.py::test_passes": "passed",
        "test_ends.py::test_setup": "failed",
        "test_ends.py::test_skips": "failed",
        "test_ends.py::test_teardown": "failed",
    }
    assert list(outcomes(file)) == sorted(outcomes(file))
    [first, *_, skipped, _] = records(file)
    assert skipped == before
    assert first["version"] == "abc1234" and "megatron-core 0." in first["stack"] and first["device"]
    assert began <= datetime.fromisoformat(first["date"]) <= datetime.now(UTC)


def test_a_failed_teardown_replaces_a_passed_call(recorder: Recorder, file: Path) -> None:
    recorder.pytest_runtest_logreport(report("a", "passed"))
    assert outcomes(file) == {"a": "passed"}
    recorder.pytest_runtest_logreport(report("a", "failed", "teardown"))
    assert outcomes(file) == {"a": "failed"}


@pytest.mark.parametrize("earlier", [True, False])
def test_a_test_without_an_outcome_stays_started(recorder: Recorder, file: Path, earlier: bool) -> None:
    before = {"test": "a", "outcome": "passed", "date": "2126-01-01T00:00:00Z"}  # by a clock that was wrong
    add(file, [before] if earlier else [])
    recorder.pytest_runtest_logstart("a")
    recorder.pytest_runtest_logreport(report("a", "passed", "setup"))
    assert outcomes(file) == {"a": "started"}  # until here if the process dies
    recorder.pytest_runtest_logreport(report("a", "skipped"))
    assert records(file) == ([before] if earlier else [])


def test_a_later_record_replaces_an_earlier_one_and_leaves_the_rest(file: Path) -> None:
    before: list[dict[str, Any]] = [{"test": name, "outcome": "failed", "version": "old"} for name in ("a", "b")]
    add(file, before)
    undated = {"test": "b", "outcome": "passed", "version": "new"}
    assert add(file, [undated]) == [] and records(file) == [before[0], undated]
    dated = {**undated, "date": "2026-01-02T03:04:05Z"}
    assert add(file, [dated]) == [] and records(file) == [before[0], dated]
    later = {**dated, "outcome": "failed", "date": "2026-01-02T03:04:06Z"}
    assert add(file, [later]) == [] and records(file) == [before[0], later]


@pytest.mark.parametrize("date", [{}, {"date": "2026-01-02T03:04:04Z"}])
def test_an_older_record_is_not_added_and_named(
    tmp_path: Path, file: Path, date: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept, other = {"test": "a", "outcome": "passed", "date": "2026-01-02T03:04:05Z"}, {"test": "b", "outcome": "passed"}
    add(file, [kept])
    add(tmp_path / "older.json", [{"test": "a", "outcome": "failed", **date}, other])
    assert main(["--json", str(file), "--add", str(tmp_path / "older.json")]) == 0
    assert records(file) == [kept, other]
    assert "has a newer record of a than" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to do"),
        (["--", "-q"], "there is nothing to do"),
        (["--add", __file__, "--", "-q", "-x"], "-q -x would go to pytest, but no test is named"),
        (["--add", "absent.json", __file__], "no such file: absent.json"),
    ],
)
def test_arguments_that_do_nothing_are_refused(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(file), *arguments])
    assert message in capsys.readouterr().err and not file.exists()


@pytest.mark.parametrize(
    ("arguments", "own", "of_pytest"),
    [
        (["a", "b"], ["a", "b"], []),
        (["a", "--", "-k", "b"], ["a"], ["-k", "b"]),
        (["--", "--", "x"], [], ["--", "x"]),  # the first one separates
        (["a", "--"], ["a"], []),
        ([], [], []),
    ],
)
def test_what_follows_the_dashes_goes_to_pytest(arguments: list[str], own: list[str], of_pytest: list[str]) -> None:
    assert _split(arguments) == (own, of_pytest)
