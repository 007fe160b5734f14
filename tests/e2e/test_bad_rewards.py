"""One bad reward stops the run with its name, or is left out if the user said so. It never poisons the batch.

The other ways to go wrong are in tests/unit/grading (test_rewards.py, test_results.py).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf

pytestmark = pytest.mark.e2e
PLUGIN = Path(__file__).with_name("bad_rewards.py")
REPLAY = Path(__file__).with_name("canned_completions.py")


def test_the_default_stops_the_run_and_names_the_function(folder: Path, dense: Path, dataset: Path) -> None:
    flags = ["--sync_check", "off", "--external_plugins", str(PLUGIN), str(REPLAY), "--reward_funcs", "raises"]
    run = megatron_rlhf(dense, dataset, folder / "raises", ranks=2, flags=flags)
    assert run.code != 0
    assert "reward function Raises raised KeyError: 'solution' (prompt" in run.output, run.output[-3000:]
    assert not list(run.folder.glob("checkpoint-*"))


def test_drop_trains_the_others(folder: Path, dense: Path, dataset: Path) -> None:
    flags = [
        "--sync_check",
        "off",
        "--external_plugins",
        str(PLUGIN),
        str(REPLAY),
        "--reward_funcs",
        "says_nan",
        "--bad_reward",
        "drop",
    ]
    run = megatron_rlhf(dense, dataset, folder / "drop", ranks=2, flags=flags)
    assert run.code == 0, run.output[-3000:]
    for step in run.log:
        assert step["rewards/dropped"] == 2  # each of the two ranks asked the function once
        assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
