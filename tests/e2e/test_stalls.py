"""A run that stops learning prints one line, also across a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import CANNED, megatron_rlhf

pytestmark = pytest.mark.e2e
LINE = "warning: 100% of the groups of the last 20 logged rollouts have equal rewards"
FLAGS = [*CANNED, "--no_save_optim", "false", "--no_save_rng", "false", "--lr_decay_style", "constant",
         "--micro_batch_size", "4", "--max_completion_length", "8", "--save_steps", "20", "--train_iters"]  # fmt: skip


@pytest.fixture(scope="module")
def equal(folder: Path, dataset: Path) -> Path:
    path = folder / "equal.jsonl"  # the reward of every second prompt is the same for all completions
    path.write_text("\n".join(dataset.read_text().splitlines()[1::2]) + "\n")
    return path


@pytest.mark.nightly
def test_a_run_of_equal_groups_warns_once_and_not_again_when_it_resumes(folder: Path, dense: Path, equal: Path) -> None:
    run = megatron_rlhf(dense, equal, folder / "stalled", 1, [*FLAGS, "20"])
    assert run.code == 0, run.output[-4000:]
    assert all(step["frac_reward_zero_std"] == 1 for step in run.log)
    assert run.output.count(LINE) == 1

    resumed = megatron_rlhf(dense, equal, folder / "stalled", 1, [*FLAGS, "22", "--resume", "auto"])
    assert resumed.code == 0, resumed.output[-4000:]
    assert len(resumed.log) == 22 and resumed.output.count(LINE) == 0


@pytest.mark.nightly
def test_nothing_is_printed_with_stall_warnings_off(folder: Path, dense: Path, equal: Path) -> None:
    silent = megatron_rlhf(dense, equal, folder / "silent", 1, [*FLAGS, "20", "--stall_warnings", "false"])
    assert silent.code == 0 and silent.output.count(LINE) == 0
    assert all(step["frac_reward_zero_std"] == 1 for step in silent.log)
