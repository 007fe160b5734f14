"""SmolLM2 learns on a CPU what scripts/train_real.sh teaches it, and does not if a fault is planted.

A single word that is not the plural earns 0.5, so REWARD is beyond a policy that learns this format alone. Gains of
20 steps, measured on 28 November 2026:

                        reward   accuracy
    default seed          0.68       0.92
    seed 7                0.70       0.89
    negated loss         -0.09       0.00
    shuffled advantages   0.32       0.03   (chance finds single words, but no plurals)
    the same, seed 7     -0.08       0.00
    stale weights        -0.01       0.00
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from scripts.summarize_run import held_out, read_steps
from tests.paths import REPOSITORY
from tests.support.runs import PLUGINS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3600)]
PLURALS = REPOSITORY / "templates" / "plugins" / "plurals.py"
REWARD, ACCURACY = 0.5, 0.5  # the least gains of a trainer that works


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    command = [sys.executable, "-m", "swift_megatron_grpo.cli", "get-model", "smollm2", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


def gains(folder: Path, model: Path, planted: str = "") -> tuple[float, float]:
    """Train; return the gain of the reward, from the first step to the mean of the last five, and of the accuracy."""
    (folder / "model").symlink_to(model)
    flags = ["--external_plugins", str(PLURALS), str(PLUGINS / "planted_faults.py"), "--sync_check", "off"]
    subprocess.run(
        [REPOSITORY / "scripts" / "train_real.sh", folder, *(flags if planted else [])],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PLANTED": planted},
        check=True,
    )
    rewards = [float(step["reward"]) for step in read_steps(folder / "output" / "logging.jsonl")]
    before, after = held_out(folder / "output" / "logging.jsonl")
    shutil.rmtree(folder / "output")  # 0.5 GB
    return fmean(rewards[-5:]) - rewards[0], after - before


def test_reward_and_held_out_accuracy_rise(tmp_path: Path, model: Path) -> None:
    reward, accuracy = gains(tmp_path, model)
    assert reward >= REWARD and accuracy >= ACCURACY


@pytest.mark.parametrize("planted", ["negated loss", "shuffled advantages", "stale weights"])
def test_a_trainer_with_a_fault_does_not_reach_the_margin(planted: str, tmp_path: Path, model: Path) -> None:
    reward, accuracy = gains(tmp_path, model, planted)
    assert reward < REWARD and accuracy < ACCURACY / 2
