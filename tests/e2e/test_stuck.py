"""A stuck run ends soon on all ranks and reports the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs import PLUGINS, REWARDS, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def inputs(folder: Path, dense: Path, dataset: Path) -> tuple[Path, Path, Path]:
    return folder, dense, dataset


def run(
    inputs: tuple[Path, Path, Path],
    name: str,
    flags: list[str],
    environment: dict[str, str] | None = None,
    kills_ranks: bool = False,
) -> Finished:
    folder, model, dataset = inputs
    plugins = [
        "--sync_check",
        "off",
        "--external_plugins",
        str(REWARDS),
        str(PLUGINS / "canned_completions.py"),
        str(PLUGINS / "stuck.py"),
    ]
    return megatron_rlhf(
        model, dataset, folder / name, 2, [*plugins, *flags], environment, timeout=400, kills_ranks=kills_ranks
    )


def sections(run: Finished) -> dict[str, str]:
    """Return the sections of the report by rank."""
    assert run.code != 0, run.output[-4000:]
    (report,) = run.folder.glob("stuck-*.txt")
    assert str(report) in run.output
    parts = re.split("^==== rank ", report.read_text(), flags=re.MULTILINE)[1:]
    assert len(parts) == 2
    return {section[0]: section for section in parts}


@pytest.mark.alone
@pytest.mark.parametrize("function", ["sleeps", pytest.param("awaits", marks=pytest.mark.nightly)])
def test_a_reward_timeout_names_the_function(inputs: tuple[Path, Path, Path], function: str) -> None:
    done = run(inputs, function, ["--reward_funcs", function, "--reward_timeout", "3"])
    assert done.code != 0  # the function would sleep for an hour
    message = (
        rf"RewardError: reward function {function} has not returned after [23]\.\d s \(--reward_timeout\), on 4 "
        "completions"
    )
    assert re.search(message, done.output), done.output[-3000:]
    assert f"RankFailure: grading failed on rank 1: RewardError: reward function {function}" in done.output
    assert not list(done.folder.glob("stuck-*.txt"))  # an error like any other


@pytest.mark.nightly
def test_the_watchdog_reports_a_stuck_reward_function(inputs: tuple[Path, Path, Path]) -> None:
    done = run(inputs, "phase", ["--reward_funcs", "sleeps", "--phase_timeout", "15"])
    ranks = sections(done)
    assert "phase grading has not finished after 15 s (--phase_timeout 15)" in done.output
    assert "stuck.py" in ranks["1"] and "in __call__" in ranks["1"]
    assert "phase grading: since" in ranks["0"] and "in all_gather" in ranks["0"] and "in _grade" in ranks["0"]


@pytest.mark.nightly
def test_the_watchdog_reports_a_rank_that_is_stuck_in_training(inputs: tuple[Path, Path, Path]) -> None:
    done = run(inputs, "train", ["--phase_timeout", "15"], {"STUCK": "train"}, kills_ranks=True)
    ranks = sections(done)
    assert "phase train has not finished after 15 s" in done.output
    assert "get_stuck" in ranks["1"] and "phase train: since" in ranks["0"]
    assert "in sum_over_ranks" in ranks["0"]
    assert re.search(r"not finished: 1\n  gloo:all_?reduce", ranks["0"]), ranks["0"]
