"""Losses, estimators and metrics of a user's file: the example of docs/algorithms.md, and mistakes that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.arguments.command_line import check_typed
from swift_megatron_grpo.grading.advantages import BASELINES
from swift_megatron_grpo.settings.algorithm import ESTIMATORS, Algorithm, defaults_of
from swift_megatron_grpo.settings.losses import CLIPS_RATIO, LossConfig
from swift_megatron_grpo.training.loss import LOSSES, reads_entropy
from swift_megatron_grpo.training.loss.total import MORE_METRICS
from tests.paths import REPOSITORY
from tests.support.grading import group_advantages
from tests.unit.arguments.test_grpo_arguments import model, refuse, typed  # noqa: F401  (fixtures)
from tests.unit.settings.flags import faults
from tests.unit.training.loss.losses import make_step, run

PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
[EXAMPLE] = re.findall(r"```python\n(# my_algorithm\.py\n.*?)```", PAGE, re.DOTALL)
TOPR = LossConfig(loss_type="topr", beta=0.0)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore the tables in place, because the checks of flags hold them."""
    tables: tuple[dict[str, Any], ...] = (LOSSES, CLIPS_RATIO, ESTIMATORS, BASELINES)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    MORE_METRICS.clear()


def execute(source: str) -> None:
    exec(compile(source, "my_algorithm.py", "exec"), {})


# ---- the example


def test_the_loss_of_the_page_is_its_formula_in_every_packing() -> None:
    execute(EXAMPLE)
    step = make_step([5, 2, 7, 3], drift=0.6)
    expected, truncated, good = 0.0, 0, 0
    for sample, now in zip(step.samples, step.logprobs, strict=True):
        for logprob, old in zip(now, sample.old_logprobs or [], strict=True):
            bad, off = sample.advantage < 0, logprob > old
            weight = min(1.0, 2.718281828459045 ** (logprob - old)) if bad else 1.0
            expected -= weight * sample.advantage * logprob / 17
            truncated, good = truncated + (bad and off), good + (not bad)
    whole, split = run(step, TOPR), run(step, TOPR, [[0, 3], [1, 2]])
    for result in (whole, split):
        assert result.loss == pytest.approx(expected, rel=1e-5)
        assert result.metrics["topr/truncated"] == pytest.approx(truncated / 17) != 0
        assert result.metrics["mine/good_tokens"] == pytest.approx(good / 17)
    assert all(map(any, whole.gradients.values()))
    assert run(step, replace(TOPR, loss_type="grpo")).metrics["mine/good_tokens"] == pytest.approx(good / 17)


def test_the_estimator_of_the_page_compares_the_valid_rewards_of_a_group() -> None:
    execute(EXAMPLE)
    assert group_advantages([1.0, 5.0, None, 2.0, 3.0, None, None, None], 4, "none", "median") == [
        *(-1.0, 3.0, 0.0, 0.0),
        *(0.0, 0.0, 0.0, 0.0),
    ]
    assert defaults_of("median") == {"scale_rewards": "none", "kl_in_reward": False}


def test_flags_select_what_a_file_registers(typed: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    chosen = {"loss_type": "topr", "advantage_estimator": "median", "temperature": 0.0}
    check_typed(["--loss_type", "topr", "--advantage_estimator", "median"])  # the parser accepts any name
    message = refuse(typed, **chosen)
    assert "--loss_type topr: unknown value; use --loss_type grpo or " in message
    assert "--advantage_estimator median: unknown value; use --advantage_estimator grpo or rloo" in message
    file = tmp_path / "my_algorithm.py"
    file.write_text(EXAMPLE)
    message = refuse(typed, **chosen, external_plugins=[str(file)])
    assert message.startswith("--temperature 0 must") and "topr" not in message and "median" not in message
    assert "or topr" in refuse(typed, loss_type="tropr", external_plugins=[str(file)])


# ---- checks as for the package's own


def test_bounds_of_clipped_ratios_are_for_losses_that_clip() -> None:
    execute(EXAMPLE)
    assert "--delta 3.0 bounds a clipped ratio, and --loss_type topr does not clip" in faults(
        LossConfig, loss_type="topr", delta=3.0
    )
    execute(EXAMPLE.split("@register_estimator")[0].replace('"topr", average', '"clips", clips_ratio=True, average'))
    assert faults(LossConfig, loss_type="clips", delta=3.0) == ""


def test_an_estimator_of_whole_rollouts_needs_no_groups() -> None:
    execute(ESTIMATOR.format("rewards") + ESTIMATOR.format("rewards").replace('"e"', '"all", has_groups=False'))
    single = {"num_generations": 1, "scale_rewards": "batch"}
    assert "use --num_generations 8" in faults(Algorithm, advantage_estimator="e", **single)
    assert faults(Algorithm, advantage_estimator="all", **single) == ""
    assert "--advantage_estimator all has no groups" in faults(
        Algorithm, advantage_estimator="all", scale_rewards="group"
    )
    assert group_advantages([1.0, None, 2.0], 1, "none", "all") == [1.0, 0.0, 2.0]
    assert group_advantages([1.0, 3.0, 2.0], 1, "none", "e") == [0.0] * 3


def test_a_loss_that_reads_entropies_gets_them() -> None:
    entropy = (
        '@register_loss("h", over_tokens, reads_entropy=True)\ndef h(terms, config):\n    return -terms.entropy, {}\n'
    )
    execute(LOSS_IMPORTS + entropy)
    assert reads_entropy(LossConfig(loss_type="h", beta=0.0)) and not reads_entropy(LossConfig(beta=0.0))


# ---- mistakes

LOSS_IMPORTS = """
from swift_megatron_grpo.training.loss.averages import over_tokens, token_mean
from swift_megatron_grpo.training.loss.plugins import register_loss, register_metric
"""
LOSS = LOSS_IMPORTS + '@register_loss("mine", over_tokens)\ndef mine(terms, config):\n    return {}\n'
METRIC = LOSS_IMPORTS + "@register_metric\ndef mine(terms, config):\n    return {{'m': {}}}\n"
ESTIMATOR = """
from swift_megatron_grpo.grading.advantages import register_estimator
@register_estimator("e", scale_rewards="none")
def e(rewards):
    return {}
"""
MISTAKES = {
    "one number for all tokens": (
        LOSS.format("terms.logprobs.sum(), {}"),
        r"loss 'mine' returns a tensor of shape \[\]; ",
    ),
    "no gradient": (LOSS.format("terms.logprobs.detach(), {}"), "return a value with a gradient"),
    "a mean over the micro batch": (
        LOSS.format("terms.logprobs * terms.logprobs.mean(), {}"),
        "loss 'mine': its value is .* in one micro batch and .* in two; divide by counts of the step",
    ),
    "not finite": (LOSS.format("terms.logprobs * float('nan'), {}"), "its value is nan in one micro batch"),
    "a metric of the micro batch": (
        LOSS.format("terms.logprobs, {'m': terms.logprobs.detach().mean()}"),
        "loss 'mine': m is .* in one micro batch",
    ),
    "a metric with a gradient": (
        METRIC.format("terms.logprobs.sum()"),
        "metric 'mine': m must be a detached tensor",
    ),
    "a metric per token": (METRIC.format("terms.logprobs.detach()"), "metric 'mine': m must be a detached tensor"),
    "a number of Python": (METRIC.format("0.5"), "metric 'mine': m must be a detached tensor"),
    "one advantage for all": (
        ESTIMATOR.format("[0.0]"),
        r"--advantage_estimator e returns \[0.0\] for \[1.0, 0.0, 3.0\]; return a finite number for each reward",
    ),
    "a division by zero": (
        ESTIMATOR.format("[r / (max(rewards) - min(rewards) or float('nan')) for r in rewards]"),
        r"returns \[nan, nan\] for \[2.0, 2.0\]",
    ),
    "a loss of the package": (
        LOSS.format("terms.logprobs, {}").replace('"mine"', '"dapo"'),
        "is a loss 'dapo' already",
    ),
    "an estimator of the package": (
        ESTIMATOR.format("rewards").replace('"e"', '"rloo"'),
        "there is an advantage estimator 'rloo' already; use another name",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_when_the_file_is_imported(mistake: str) -> None:
    source, message = MISTAKES[mistake]
    known = [list(table) for table in (LOSSES, ESTIMATORS)]
    with pytest.raises(ValueError, match=message):
        execute(source)
    assert [list(table) for table in (LOSSES, ESTIMATORS)] == known and not MORE_METRICS
