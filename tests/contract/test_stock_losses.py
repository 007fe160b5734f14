"""ms-swift 4.6.0's own loss_func and ours, on the same step in one micro batch: loss, gradients and metrics by name.

In one micro batch on one rank ms-swift's means of micro batches are means of the step, so the two must agree; what
ms-swift gets wrong needs several.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from typing import Any

import numpy
import pytest

from swift_megatron_grpo.training.loss import effective_sample_size
from tests.contract.cases import CASES, LENGTHS, Case
from tests.unit.training.loss.losses import Step, make_step, run


@cache
def stock() -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.contract.stock_losses"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.rsplit("SEEN ", 1)[1])
    return found


def prepared(case: Case) -> Step:
    """As the loop hands it over: selected by entropy, truncated completions left out."""
    step = make_step(LENGTHS, seed=case.seed)
    if case.quantile < 1:
        threshold = numpy.quantile([e for row in step.entropies for e in row], 1 - case.quantile)
        for sample, entropies in zip(step.samples, step.entropies, strict=True):
            sample.selected = [entropy >= threshold for entropy in entropies]
    if case.overlong_filter:
        for i in case.truncated:
            out = step.samples[i]
            out.completion_mask, out.left_out = [False] * len(out.tokens), LENGTHS[i]
            out.old_logprobs = out.ref_logprobs = out.rollout_logprobs = []
            step.logprobs[i], step.entropies[i] = [], []
    return step


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_ms_swifts(name: str) -> None:
    theirs, ours = stock()[name], run(prepared(CASES[name]), CASES[name].config)
    assert ours.loss == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
    for i, gradient in ours.gradients.items():
        assert gradient == pytest.approx(theirs["gradients"][i][: len(gradient)], rel=1e-4, abs=1e-6)


# Of whole micro batches in ms-swift and of completions here: its extreme of one micro batch is its mean.
OURS_IS_FINER = {"clip_ratio/low_min", "clip_ratio/high_max"}
ELSEWHERE = {"completions/mean_length", "completions/max_length", "completions/min_length", "entropy/entropy_threshold"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.overlong_filter])
def test_metrics_are_ms_swifts(name: str) -> None:
    case = CASES[name]
    ours = effective_sample_size(run(prepared(case), case.config).metrics)
    theirs = {key: value for key, value in stock()[name]["metrics"].items() if key not in OURS_IS_FINER | ELSEWHERE}
    theirs.pop("loss")
    if case.config.correction.mask_delta is not None:  # ms-swift leaves masked sequences out of these, we count them
        theirs = {key: value for key, value in theirs.items() if not key.startswith(("clip_", "cispo_", "fipo/", "kl"))}
    assert set(theirs) <= set(ours)
    assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert all(map(math.isfinite, ours.values()))
