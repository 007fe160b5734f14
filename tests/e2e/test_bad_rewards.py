"""A bad reward stops the run and names its function, or is dropped with --bad_reward drop; others are unaffected.

Other failures of reward functions are covered in tests/unit/grading (test_rewards.py, test_results.py).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf

pytestmark = pytest.mark.e2e
PLUGIN = Path(__file__).with_name("bad_rewards.py")
CANNED = Path(__file__).with_name("canned_completions.py")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "reward function Raises raised KeyError: 'solution' (prompt"),
        ("exits", "reward function Exits raised SystemExit: no solution (prompt"),
        ("exits_at_once", "ended with exit code 3 during reward function ExitsAtOnce: the function called os._exit"),
    ],
)
def test_a_bad_reward_stops_the_run_and_names_the_function(
    folder: Path, dense: Path, dataset: Path, function: str, message: str
) -> None:
    flags = ["--sync_check", "off", "--external_plugins", str(PLUGIN), str(CANNED), "--reward_funcs", function]
    run = megatron_rlhf(dense, dataset, folder / function, ranks=2, flags=flags)
    assert run.code != 0
    assert message in run.output, run.output[-3000:]
    assert not list(run.folder.glob("checkpoint-*"))


def test_drop_trains_the_other_completions(folder: Path, dense: Path, dataset: Path) -> None:
    flags = [
        "--sync_check",
        "off",
        "--external_plugins",
        str(PLUGIN),
        str(CANNED),
        "--reward_funcs",
        "returns_nan",
        "--bad_reward",
        "drop",
    ]
    run = megatron_rlhf(dense, dataset, folder / "drop", ranks=2, flags=flags)
    assert run.code == 0, run.output[-3000:]
    for step in run.log:
        assert step["rewards/dropped"] == 2  # each of the two ranks called the function once
        assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
