"""The lines that a run prints: aligned columns, phases, harmless text of a model, and the time left."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.output.console.lines import (
    Pace,
    compact,
    completion_line,
    duration,
    evaluation_line,
    header,
    phase_bar,
    phases_of,
    status,
    step_line,
)

METRICS = {
    "reward": 0.71342, "completions/mean_length": 23.9, "completions/clipped_ratio": 0.5, "kl": 0.00012, "loss": -1e-8,
    "grad_norm": 0.29213, "speed/tokens_per_second": 12345.6, "time/generation": 0.5, "time/train": 1.0,
}  # fmt: skip


def test_a_step_stands_under_the_titles_of_its_columns() -> None:
    title, line = header("1000/1000"), step_line("7/1000", 3, METRICS, 2.0, 3600.0, 9)
    assert line.split() == [
        "7/1000", "3", "0.7134", "23.90", "50%", "1.2e-04", "-1.0e-08", "0.2921", "12346", "-", "2.0s", "60m00s",
        "TTTTTTTTTTGGGGG.....",
    ]  # fmt: skip
    for name, value in (("step", "7/1000"), ("reward", "0.7134"), ("tok/s", "12346"), ("left", "60m00s")):
        assert title.index(name) + len(name) == line.index(value) + len(value)
    assert line.index("TTT") == title.index("phases")


def test_metrics_that_a_step_lacks_are_dashes() -> None:
    line = step_line("1/2", 0, {"time/replay": 1.0}, None, None, 4)
    assert line.split()[2:] == ["-"] * 10 + ["D" * 20]


@pytest.mark.parametrize("value", [0.0, 1e-9, -0.00099, 0.5, -9.9999, 10.0, 999.99, 1000.0, 999_999.0, 1e30, -1e30])
def test_a_number_is_short(value: float) -> None:
    text = compact(value)
    assert len(text) <= 8 and float(text) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.04, "0.0s"), (99.97, "1m40s"), (5999.0, "99m59s"),
                                               (6000.0, "1h40m"), (400_000.0, "4d15h")])  # fmt: skip
def test_a_time_is_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_bar_has_the_length_of_the_step_whatever_its_phases() -> None:
    many = {f"time/phase{i}": 0.01 * i for i in range(30)}
    assert len(phase_bar(many, 1.0)) == 20  # the phases overlap the measured time
    assert phase_bar({"time/train": 1.0}, 10.0) == "TT" + 18 * "."
    assert phase_bar({}, 1.0) == ""
    assert list(phases_of({"time/a": 1.0, "time/b": 2.0, "loss": 3.0})) == ["b", "a"]


def test_a_completion_cannot_control_the_terminal() -> None:
    line = completion_line(4, 0.5, "a\x1b[2Jb\nc\x9b31m\u202ed")
    assert line.isprintable() and "\\x1b[2Jb\\nc\\x9b31m\\u202ed" in line
    assert len(completion_line(4, None, "x" * 10**6)) < 250


def test_an_evaluation_has_a_line() -> None:
    assert evaluation_line(4, {"eval_reward": 0.5, "eval_loss": 1.0}) == "evaluation at step 4: reward 0.5000"


def test_the_time_left_excludes_the_first_rollout() -> None:
    pace = Pace(10, 20, 100.0, steps_per_rollout=2)
    pace.finish(11, 160.0)  # start-up
    pace.finish(12, 161.0)
    assert pace.remaining is None
    pace.finish(13, 165.0)
    assert pace.remaining is None  # this step has generated, the next one does not
    pace.finish(14, 167.0)
    assert pace.remaining == 18.0
    pace.finish(16, 168.0)  # two at once, as with --rollout_only
    assert pace.remaining == pytest.approx(4 * (4 + 2 + 0.5 + 0.5) / 4)


def test_the_status_fits_into_the_terminal() -> None:
    text = status(5, 10, "rollout 2", 61.0, 30.0, 60)
    assert text.startswith("█" * 12 + "░" * 12 + " 5/10 · rollout 2 · 61.0s") and len(text) == 59
