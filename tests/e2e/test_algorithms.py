"""The decisions made once per step, in the whole loop, on a pipeline and on tensor parallel ranks.

Every algorithm learns the quickstart's task.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.train_every_algorithm import ALGORITHMS
from tests.paths import REPOSITORY
from tests.support.runs import CANNED, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e
BETA = 0.05
FLAGS = [*CANNED, "--steps_per_generation", "2", "--train_iters", "4", "--save_steps", "4",
         "--torch_dtype", "float32", "--fp16", "false", "--adam_eps", "1e-5",
         "--advantage_estimator", "rloo", "--beta", str(BETA), "--kl_target", "0.01", "--kl_horizon", "100",
         "--dynamic_sample", "true", "--max_resample_times", "2", "--overlong_filter", "true",
         "--top_entropy_quantile", "0.5", "--log_entropy", "true", "--entropy_coef", "0.01", "--loss_type", "fipo",
         "--rollout_importance_sampling_mode", "sequence_mask", "--log_rollout_offpolicy_metrics", "true",
         "--off_policy_sequence_mask_delta", "0.01", "--m2_threshold", "0.005"]  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(folder: Path, dense: Path, dataset: Path) -> Finished:
    run = megatron_rlhf(dense, dataset, folder / "pp2", 2, [*FLAGS, "--pipeline_model_parallel_size", "2"])
    assert run.code == 0, run.output[-4000:]
    return run


@pytest.mark.nightly
def test_a_pipeline_matches_tensor_parallel_ranks(pipeline: Finished, folder: Path, dense: Path, dataset: Path) -> None:
    """The KL in the reward needs log-probs that only the last stage has; ms-swift subtracts None on the others."""
    layout = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
    tensor = megatron_rlhf(dense, dataset, folder / "tp2", 2, [*FLAGS, *layout])
    assert tensor.code == 0, tensor.output[-4000:]
    assert len(pipeline.log) == len(tensor.log) == 4
    for a, b in zip(pipeline.log, tensor.log, strict=True):
        measured = ("time/", "speed/", "train_speed", "memory")
        names = [n for n, v in a.items() if isinstance(v, float) and not n.startswith(measured)]
        assert len(names) >= 36
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, rel=2e-3, abs=1e-5)


def test_the_reward_is_reduced_by_beta_times_the_kl(pipeline: Finished) -> None:
    rollouts = [step for step in pipeline.log if "reward" in step]
    assert abs(rollouts[0]["kl"]) < 1e-5 and abs(rollouts[1]["kl"]) > 0.01
    for step in rollouts:
        graded = step["rewards/every_second/mean"]
        assert step["reward"] == pytest.approx(graded - step["kl_beta"] * step["kl"], abs=1e-5)


def test_beta_adapts_and_is_saved(pipeline: Finished) -> None:
    first, second = (step["kl_beta"] for step in pipeline.log if "kl_beta" in step)
    assert first == BETA and second == pytest.approx(BETA * (1 - 0.2 * 16 / 100))  # a KL of 0 is far below the target
    saved = json.loads((pipeline.last_checkpoint / "kl_beta.json").read_text())["beta"]
    assert saved != second


def test_groups_of_equal_rewards_are_replaced(pipeline: Finished) -> None:
    steps = [step for step in pipeline.log if "dynamic_sample/rounds" in step]
    assert sum(step["dynamic_sample/rounds"] for step in steps) > 0
    for step in steps:
        assert step["dynamic_sample/generated_groups"] >= 4
        if step["dynamic_sample/uniform_groups"] == 0:
            assert step["rewards/every_second/mean"] < 1


def test_tokens_are_selected_by_entropy(pipeline: Finished) -> None:
    for step in pipeline.log:
        assert 0 < step["entropy/entropy_min"] <= step["entropy/entropy_mean"] <= step["entropy/entropy_max"] < 5.6
        assert 5 < step["entropy/entropy_threshold"] < 5.6


def test_tokens_that_have_moved_are_masked(pipeline: Finished) -> None:
    for step in pipeline.log:
        assert 0 < step["m2/masked_frac"] < 0.9 and step["m2/second_moment"] > 0.005


def test_a_loss_an_estimator_and_a_metric_of_a_users_file_train(folder: Path, dense: Path, dataset: Path) -> None:
    page = (REPOSITORY / "docs" / "algorithms.md").read_text()
    [example] = re.findall(r"```python\n(# my_algorithm\.py\n.*?)```", page, re.DOTALL)
    plugin = folder / "my_algorithm.py"
    plugin.write_text(example)
    run = megatron_rlhf(
        dense,
        dataset,
        folder / "users",
        ranks=1,
        flags=[*CANNED, str(plugin), "--loss_type", "topr", "--advantage_estimator", "median",
               "--steps_per_generation", "2", "--train_iters", "2"],
    )  # fmt: skip
    assert run.code == 0, run.output[-4000:]
    first, second = run.log
    assert first["topr/truncated"] == 0 < second["topr/truncated"] < 1  # the second step is off-policy
    assert 0 < first["mine/good_tokens"] < 1
    assert min(first["grad_norm"], second["grad_norm"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns(name: str, tmp_path: Path) -> None:
    """Each algorithm takes about a minute. docs/algorithms.md shows the measured rewards."""
    command = [sys.executable, "-m", "benchmarks.train_every_algorithm", "--only", name,
               "--out", str(tmp_path / "r.json"), "--work", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    result = json.loads((tmp_path / "r.json").read_text())[name]
    assert result["after"] > 1.3 * result["before"] > 0
