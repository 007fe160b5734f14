"""Values computed once per step: the KL of completions, beta, the entropy threshold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.grading.results import add_advantages, subtract_kl
from swift_megatron_grpo.loop.samples import entropy_threshold, select_tokens
from swift_megatron_grpo.settings.algorithm import ScaleRewards
from swift_megatron_grpo.settings.config import BadRewardPolicy, GradingConfig
from swift_megatron_grpo.settings.losses import Kl
from swift_megatron_grpo.training.loss.kl import ESTIMATORS, KlController, divergences
from swift_megatron_grpo.types import Prompt, Rollout, Sample, TokenValues
from tests.support.grading import total_rewards

POLICY = {0: TokenValues([-1.0, -2.0], None), 3: TokenValues([-0.5], None), 5: TokenValues([], None)}
REFERENCE = {0: TokenValues([-1.5, -1.0], None), 3: TokenValues([-0.5], None), 5: TokenValues([], None)}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.5 - 1.0),
        ("abs", 0.5 + 1.0),
        ("k2", 0.125 + 0.5),
        ("k3", math.exp(-0.5) + 0.5 - 1 + math.exp(1.0) - 1.0 - 1),
    ],
)
def test_the_kl_of_a_completion_is_the_sum_over_its_tokens(estimator: str, expected: float) -> None:
    computed = divergences(POLICY, REFERENCE, estimator)  # type: ignore[arg-type]
    assert computed == {0: pytest.approx(expected), 3: 0.0, 5: 0.0}


def test_k1_and_k3_are_unbiased_and_k2_has_the_kls_gradient() -> None:
    """Checked on a distribution of three tokens, where expectations have closed forms."""
    scores = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    policy = scores.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        estimate = (policy.exp() * ESTIMATORS[name](policy, reference)).sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=1e-9)
    (expected,) = torch.autograd.grad(exact, scores, retain_graph=True)
    (actual,) = torch.autograd.grad((policy.detach().exp() * ESTIMATORS["k2"](policy, reference)).sum(), scores)
    assert actual.tolist() == pytest.approx(expected.tolist(), rel=1e-9)


def grading(scale: ScaleRewards, bad_reward: BadRewardPolicy, **changes: Any) -> GradingConfig:
    sizes: Any = {"num_generations": 2, "reward_names": ("f",), "reward_weights": (1.0,)}
    return GradingConfig(**sizes, scale_rewards=scale, bad_reward=bad_reward, **changes)


def test_kl_in_the_reward_equals_ms_swifts() -> None:
    from swift.rl_core.advantage import compute_advantages

    rewards, kls, beta = [1.0, 0.0, 2.0, 2.0], [0.5, -0.25, 3.0, 0.0], 0.1
    rollouts = [Rollout(Prompt(f"{i // 2}", {}), [1], [2], None, "", "stop", 0) for i in range(4)]
    for estimator in ("grpo", "rloo", "reinforce_plus_plus"):
        settings = grading("batch", "stop", advantage_estimator=estimator)
        graded = add_advantages(
            subtract_kl(total_rewards(rollouts, [[r] for r in rewards], settings), np.array(kls), beta), settings
        )
        reference, penalised = compute_advantages(
            torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(1, dtype=torch.float64), 2, estimator,
            "batch", True, beta, torch.tensor(kls, dtype=torch.float64))  # fmt: skip
        assert [completion.reward for completion in graded] == pytest.approx(penalised.tolist())
        assert [completion.advantage for completion in graded] == pytest.approx(reference.tolist(), rel=1e-6)


def test_a_dropped_completion_has_no_penalty() -> None:
    settings = grading("none", "drop")
    rollouts = [Rollout(Prompt("0", {}), [1], [2], None, "", "stop", 0)] * 2
    graded = subtract_kl(total_rewards(rollouts, [[1.0], [None]], settings), np.array([2.0, 2.0]), 0.5)
    assert [completion.reward for completion in graded] == [0.0, None]


def kl(target: float | None, horizon: int = 10000) -> Kl:
    return Kl(kl_in_reward=False, kl_target=target, kl_horizon=horizon, beta=0.1)


def test_beta_adapts_to_the_kl() -> None:
    """The formula of verl and ROLL: beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon."""
    beta = KlController(0.1, kl(0.02, 1000))
    beta.observe(0.021, 100)
    assert beta.value == pytest.approx(0.1 * (1 + 0.05 * 0.1))
    beta.observe(10.0, 100)
    assert beta.value == pytest.approx(0.1 * 1.005 * 1.02)
    beta.observe(-1.0, 100)
    assert beta.value == pytest.approx(0.1 * 1.005 * 1.02 * 0.98)


def test_without_a_target_beta_is_constant() -> None:
    beta = KlController(0.1, kl(None))
    beta.observe(10.0, 100)
    assert beta.value == 0.1 and not beta.adapts


def test_a_resumed_run_continues_with_its_beta(tmp_path: Path) -> None:
    saved, fresh = KlController(0.123, kl(0.1)), KlController(0.04, kl(0.1))
    saved.save(str(tmp_path))
    fresh.restore([str(tmp_path / "elsewhere")])
    assert fresh.value == 0.04
    fresh.restore([str(tmp_path / "elsewhere"), str(tmp_path)])
    assert fresh.value == 0.123


# ---- the threshold

rows = st.lists(st.lists(st.floats(0, 10, width=32), max_size=9), min_size=1, max_size=8)


@given(rows, st.floats(0.05, 1.0), st.randoms(use_true_random=False))
def test_the_threshold_is_of_all_tokens_independent_of_their_distribution(
    entropies: list[list[float]], quantile: float, rng: object
) -> None:
    """ms-swift computes it per micro batch and rank, so its selection depends on the layout."""
    flat = [e for row in entropies for e in row]
    threshold = entropy_threshold([np.asarray(row, np.float32) for row in entropies], quantile)
    rng.shuffle(entropies)  # type: ignore[attr-defined]
    assert entropy_threshold([np.asarray(row, np.float32) for row in entropies], quantile) == threshold
    if not flat:
        assert threshold == 0.0
        return
    values = torch.tensor(flat, dtype=torch.float32)
    assert threshold == pytest.approx(torch.nanquantile(values, 1 - quantile).item(), rel=1e-5, abs=1e-5)


def test_tokens_at_or_above_the_threshold_are_selected() -> None:
    sample = Sample([1, 1, 1, 1], [False, True, True, True], 0.0)
    select_tokens(sample, np.asarray([0.5, 2.0, 1.0], np.float32), 1.0)
    assert sample.selected == [False, True, True]
