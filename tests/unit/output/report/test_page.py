"""The report while a run trains: not too often, and without an effect on the run if it fails."""

from __future__ import annotations

from pathlib import Path

from swift_megatron_grpo.output.report.page import LiveReport
from tests.unit.output.report.example_run import make_run, step_row, write_log


def test_a_report_is_written_every_half_minute_and_at_the_end(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1)
    time = [0.0]
    live = LiveReport(tmp_path, print, clock=lambda: time[0])
    page = tmp_path / "report.html"
    live.update()
    first = page.read_text()
    write_log(tmp_path, [step_row(2, 10)])
    time[0] = 29.0
    live.update()
    assert page.read_text() == first
    time[0] = 31.0
    live.update()
    assert '"step":2' in page.read_text()
    write_log(tmp_path, [step_row(3, 10)])
    live.update(now=True)
    assert '"step":3' in page.read_text()


def test_a_slow_report_takes_a_hundredth_of_the_time(tmp_path: Path) -> None:
    make_run(tmp_path)
    times = iter([0.0, 5.0, 499.0, 506.0, 511.0])
    live = LiveReport(tmp_path, print, clock=lambda: next(times))
    page = tmp_path / "report.html"
    live.update()  # takes from 0 to 5
    page.unlink()
    live.update()  # at 499
    assert not page.exists()
    live.update()  # at 506
    assert page.exists()


def test_a_failure_is_logged_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "report.html").mkdir()  # which no file can replace
    warnings: list[str] = []
    live = LiveReport(tmp_path, warnings.append)
    live.update(now=True)
    live.update(now=True)
    assert len(warnings) == 1 and "report.html cannot be written, and the run continues without it" in warnings[0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "args.json",
        "completions.jsonl",
        "logging.jsonl",
        "report.html",
    }
