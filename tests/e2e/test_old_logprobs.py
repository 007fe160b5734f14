"""Old log-probs of vLLM save a pass and train as the trainer's own do, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import megatron_rlhf

pytestmark = pytest.mark.e2e


def test_the_engines_old_log_probs_train_like_the_policys(folder: Path, dense: Path, dataset: Path) -> None:
    """In fp32 both are equal up to rounding, so a replay of the same completions has nearly the same steps."""
    flags = ["--torch_dtype", "float32", "--fp16", "false", "--adam_eps", "1e-5", "--steps_per_generation", "2",
             "--train_iters", "4", "--save_steps", "100"]  # fmt: skip
    rollouts = str(folder / "rollouts")
    engine, policy = (
        megatron_rlhf(dense, dataset, folder / name, 2, [*flags, "--old_logprobs", name, *more])
        for name, more in (("engine", ["--rollout_dump", rollouts]), ("policy", ["--rollout_replay", rollouts]))
    )
    assert engine.code == policy.code == 0, (engine.output + policy.output)[-4000:]
    assert not any("time/old_logprobs" in step for step in engine.log)
    assert ["time/old_logprobs" in step for step in policy.log] == [True, False, True, False]
    for step, expected in zip(engine.log, policy.log, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert step["actor/approxkl"] == pytest.approx(expected["actor/approxkl"], abs=1e-6)
    assert policy.log[0]["actor/approxkl"] == 0 < policy.log[1]["actor/approxkl"]
