"""Rollouts without vLLM's log-probs: losses and gradients are the same, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import Finished, megatron_rlhf

STEPS = 5


def run(folder: Path, model: Path, dataset: Path, *flags: str) -> Finished:
    finished = megatron_rlhf(model, dataset, folder, 1, ["--train_iters", str(STEPS), "--save_steps", "100", *flags])
    assert finished.code == 0, finished.output[-4000:]
    return finished


@pytest.mark.nightly
@pytest.mark.e2e
def test_rollouts_in_between_have_no_log_probs_and_the_same_losses(folder: Path, dense: Path, dataset: Path) -> None:
    always = run(folder / "always", dense, dataset, "--rollout_logprobs_interval", "1")
    rarely = run(folder / "rarely", dense, dataset, "--rollout_logprobs_interval", "3")
    for name in ("loss", "grad_norm", "actor/pg_loss", "completions/mean_length", "reward"):
        assert [step[name] for step in rarely.log] == [step[name] for step in always.log], name
    assert ["rollout/k3_kl" in step for step in always.log] == [True] * STEPS
    assert ["rollout/k3_kl" in step for step in rarely.log] == [True, False, False, True, False]
    assert ["sync_check/max_diff" in step for step in rarely.log] == [True] * 3 + [False] * (STEPS - 3)
