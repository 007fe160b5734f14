"""A bad reward stops the run and names its function, or is dropped with --bad_reward drop; others are unaffected.

Other failures of reward functions are covered in tests/unit/grading (test_rewards.py, test_results.py).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.runs import PLUGINS, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e
PLUGIN = PLUGINS / "bad_rewards.py"
CANNED = PLUGINS / "canned_completions.py"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "reward function raises raised KeyError: 'solution' (on 4 completions, the first: prompt"),
        ("exits", "reward function exits raised SystemExit: no solution (on 4 completions, the first: prompt"),
        # "with exit code 3", or "suddenly" if the process that started the ranks has read the code first
        ("exits_at_once", "during reward function exits_at_once: the function called os._exit"),
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


def train(inputs: tuple[Path, Path, Path], function: str, *flags: str) -> Finished:
    folder, model, dataset = inputs
    plugins = ["--sync_check", "off", "--external_plugins", str(PLUGIN), str(CANNED), "--reward_funcs", function]
    run = megatron_rlhf(model, dataset, folder / f"trained-{function}", 2, [*plugins, *flags])
    assert run.code == 0, run.output[-3000:]
    return run


def test_drop_trains_the_other_completions(folder: Path, dense: Path, dataset: Path) -> None:
    for step in train((folder, dense, dataset), "returns_nan", "--bad_reward", "drop").log:
        assert step["rewards/dropped"] == 2  # each of the two ranks called the function once
        assert math.isfinite(step["loss"]) and step["grad_norm"] > 0


def test_drop_trains_the_other_batches_of_a_function_that_raises(folder: Path, dense: Path, dataset: Path) -> None:
    """The function raises on one of two ranks, in the first of two steps."""
    run = train((folder, dense, dataset), "raises_once", "--bad_reward", "drop")
    named = "reward function raises_once raised KeyError: 'solution'; --bad_reward drop leaves its batch out (on 4 comp"
    assert run.output.count(named) == 1, run.output[-3000:]
    first, second = run.log
    assert first["rewards/dropped"] == 4 and "rewards/dropped" not in second
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in run.log)


def test_megabytes_of_output_of_a_reward_neither_block_nor_end_a_run(folder: Path, dense: Path, dataset: Path) -> None:
    run = train((folder, dense, dataset), "prints_megabytes")
    # steps, ranks, outputs, lines; the ranks share one pipe, so their lines are mixed
    assert len(run.log) == 2 and run.output.count("x") >= 2 * 2 * 2 * 64 * 2**16
