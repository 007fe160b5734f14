"""ms-swift 4.6.0's own loss_func against ours on the same step in one micro batch: loss, gradients and metrics.

With one micro batch on one rank, ms-swift's means over micro batches are means over the step, so both must agree.
ms-swift's errors appear only with several micro batches.
"""

from __future__ import annotations

import inspect
import math
import re
from functools import cache
from typing import Any

import numpy
import pytest

from swift_megatron_grpo.training.loss import LOSSES, effective_sample_size
from tests.support.interpreter import printed_result
from tests.support.loss_cases import CASES, LENGTHS, OF_MS_SWIFT, Case
from tests.unit.training.loss.losses import Step, make_step, run


@cache
def stock() -> dict[str, Any]:
    code = "from tests.programs.contract import stock_losses; stock_losses.main()"
    results: dict[str, Any] = printed_result(code)
    return results


def test_the_losses_of_ms_swift_are_compared_and_no_others() -> None:
    """A loss that only this package has needs no entry here."""
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    source = inspect.getsource(MegatronGRPOTrainer.loss_func)
    compared = re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|'.*?')", source)
    assert {name for names in compared for name in re.findall(r"'(\w+)'", names)} == set(OF_MS_SWIFT) <= set(LOSSES)


def prepared(case: Case) -> Step:
    """Return the step as the loop passes it to the loss: selected by entropy, without truncated completions."""
    step = make_step(LENGTHS, seed=case.seed)
    if case.quantile < 1:
        threshold = numpy.quantile([e for row in step.entropies for e in row], 1 - case.quantile)
        for sample, entropies in zip(step.samples, step.entropies, strict=True):
            sample.selected = [entropy >= threshold for entropy in entropies]
    if case.overlong_filter:
        for i in case.truncated:
            sample = step.samples[i]
            sample.completion_mask, sample.left_out = [False] * len(sample.tokens), LENGTHS[i]
            sample.old_logprobs = sample.ref_logprobs = sample.rollout_logprobs = []
            step.logprobs[i], step.entropies[i] = [], []
    return step


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_ms_swift(name: str) -> None:
    expected, ours = stock()[name], run(prepared(CASES[name]), CASES[name].config)
    assert ours.loss == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    for i, gradient in ours.gradients.items():
        assert gradient == pytest.approx(expected["gradients"][i][: len(gradient)], rel=1e-4, abs=1e-6)


# Extremes over micro batches in ms-swift and over completions here; in one micro batch ms-swift's extreme is its mean.
PER_COMPLETION = {"clip_ratio/low_min", "clip_ratio/high_max"}
COMPUTED_ELSEWHERE = {
    "completions/mean_length",
    "completions/max_length",
    "completions/min_length",
    "entropy/entropy_threshold",
}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.overlong_filter])
def test_metrics_equal_those_of_ms_swift(name: str) -> None:
    case = CASES[name]
    ours = effective_sample_size(run(prepared(case), case.config).metrics)
    excluded = {"loss"} | PER_COMPLETION | COMPUTED_ELSEWHERE
    expected = {key: value for key, value in stock()[name]["metrics"].items() if key not in excluded}
    if case.config.correction.off_policy_sequence_mask_delta is not None:
        # ms-swift excludes masked sequences from these, we include them
        different = ("clip_", "cispo_", "fipo/", "kl")
        expected = {key: value for key, value in expected.items() if not key.startswith(different)}
    assert set(expected) <= set(ours)
    assert {key: ours[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(map(math.isfinite, ours.values()))
