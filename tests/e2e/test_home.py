"""A run whose completions stay on their ranks equals one in which every rank has all of them, as a dump requires."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import CANNED, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e
SAME = ("loss", "grad_norm", "reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps_per_generation", "2", "--old_logprobs", "engine", "--max_tokens_per_micro_batch", "128"],
        pytest.param(
            [
                "--tensor_model_parallel_size",
                "2",
                "--beta",
                "0.1",
                "--kl_in_reward",
                "true",
                "--overlong_filter",
                "true",
            ],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["data-parallel", "tensor-parallel"],
)
def test_completions_that_stay_home_train_the_same(folder: Path, dense: Path, dataset: Path, flags: list[str]) -> None:
    def run(name: str, *more: str) -> Finished:
        name = f"{name}-{flags[0].strip('-')}"
        done = megatron_rlhf(dense, dataset, folder / name, 2, [*CANNED, "--train_iters", "4", *flags, *more])
        assert done.code == 0, done.output[-4000:]
        return done

    home, everywhere = run("home"), run("everywhere", "--rollout_dump", str(folder / f"dump-{flags[0].strip('-')}"))
    for ours, theirs in zip(home.log, everywhere.log, strict=True):
        assert {name: ours.get(name) for name in SAME} == {name: theirs.get(name) for name in SAME}
