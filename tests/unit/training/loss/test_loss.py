"""Every loss, compared with the paper's formula in fp64, and independent of packing."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swift.rl_core.advantage import apply_rlsd_reweight, compute_sdar_loss, expand_advantage_to_per_token

from swift_megatron_grpo.settings.distillation import Rlsd, Sdar
from swift_megatron_grpo.settings.losses import Correction, Fipo, LossConfig, Vespo
from swift_megatron_grpo.training.loss import LOSSES, effective_sample_size
from swift_megatron_grpo.training.loss.policies import discounted_future_sum
from swift_megatron_grpo.types import Sample
from tests.unit.training.loss.loss_formulas import reference
from tests.unit.training.loss.losses import GROUP, Step, make_step, run

PLAIN = LossConfig(
    loss_type="grpo",
    epsilon=0.2,
    epsilon_high=0.3,
    beta=0.1,
    max_completion_length=16,
    log_entropy=True,
)
CORRECTION = Correction(log_rollout_offpolicy_metrics=True)
NAMES = sorted(LOSSES)
LEVELS = ["token", "sequence", "sequence_token"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
VARIANTS = {
    "plain": PLAIN,
    "no-kl": replace(PLAIN, beta=0.0),
    "delta": replace(PLAIN, delta=1.5),
    "dual_clip": replace(PLAIN, dual_clip=1.6),
    "entropy": replace(PLAIN, entropy_coef=0.05),
    "mask": replace(PLAIN, correction=Correction(off_policy_sequence_mask_delta=0.02)),
    **{level: replace(PLAIN, importance_sampling_level=level) for level in LEVELS[1:]},
    **{
        mode: replace(
            PLAIN,
            correction=Correction(
                rollout_importance_sampling_mode=mode,
                rollout_importance_sampling_threshold=1.1,
                log_rollout_offpolicy_metrics=True,
            ),
        )
        for mode in MODES
    },
    **{f"kl-{estimator}": replace(PLAIN, kl_estimator=estimator) for estimator in ("k1", "abs", "k2")},
    "kl-corrected": replace(PLAIN, use_bias_correction_kl=True),
    "kl-corrected-sequence": replace(PLAIN, use_bias_correction_kl=True, importance_sampling_level="sequence"),
    "near": replace(PLAIN, epsilon=0.01, epsilon_high=0.02),
    "vespo-sharp": replace(
        PLAIN, vespo=Vespo(vespo_k_pos=0.5, vespo_lambda_pos=1.5, vespo_k_neg=1.0, vespo_lambda_neg=0.7)
    ),
    "fipo-wide": replace(
        PLAIN,
        fipo=Fipo(fipo_decay_rate=3.0, fipo_clip_range=0.5, fipo_clip_high_only=False, fipo_safety_threshold=1.2),
        delta=1.4,
    ),
    "fipo-free": replace(
        PLAIN,
        fipo=Fipo(fipo_decay_rate=2.0, fipo_clip_range=None, fipo_clip_high_only=True, fipo_safety_threshold=None),
    ),
}


def check(step: Step, config: LossConfig) -> None:
    result = run(step, config)
    with torch._C.DisableTorchFunction():  # the CPU platform's, which costs more than an operation on a number
        loss, gradients = reference(step, config)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for i, gradient in enumerate(gradients):
        assert result.gradients[i] == pytest.approx(gradient, rel=1e-4, abs=1e-6)


# ---- against the formulas


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_match_the_formula(name: str, variant: str) -> None:
    for seed in range(3):
        check(make_step([5, 1, 9, 3, 2, 7, 4, 6], seed), replace(VARIANTS[variant], loss_type=name))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_value_and_gradient_match_the_formula(name: str) -> None:
    step = make_step([5, 1, 9, 3])
    for sample in step.samples:
        sample.old_logprobs = None
    config = replace(PLAIN, loss_type=name, epsilon_high=5.0 if name == "cispo" else 0.3)  # for cispo, the bound itself
    check(step, config)
    metrics = run(step, config).metrics
    assert metrics["actor/approxkl"] == 0 and metrics.get("actor/clipfrac", 0) == 0  # exactly


@pytest.mark.parametrize("name", NAMES)
def test_unselected_tokens_are_in_the_kl_but_not_in_the_policy_loss(name: str) -> None:
    step = make_step([5, 1, 9, 3])
    rng = random.Random(1)
    for sample in step.samples:
        sample.selected = [rng.random() < 0.5 for _ in range(sum(sample.completion_mask))]
    check(step, replace(PLAIN, loss_type=name))


@pytest.mark.parametrize("name", NAMES)
def test_completions_that_overlong_filter_removes_count_only_in_divisors(name: str) -> None:
    """This is as in ms-swift, which masks after it has computed the divisors; for real it also adds scores of 0."""
    step = make_step([5, 1, 9, 3])
    removed = step.samples[2]
    removed.completion_mask, removed.left_out = [False] * len(removed.tokens), 9
    removed.old_logprobs = removed.ref_logprobs = removed.rollout_logprobs = []
    step.logprobs[2], step.entropies[2] = [], []
    check(step, replace(PLAIN, loss_type=name))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("real", "vespo")])
def test_sequences_of_one_completion_are_averaged_together(name: str, variant: str) -> None:
    step = make_step([5, 1, 9, 0, 2, 7, 4, 6])
    for sample, completion in zip(step.samples, [3, 3, -1, 0, 0, 0, -1, 9], strict=True):
        sample.completion = completion
    step.samples[3].old_logprobs = step.samples[3].ref_logprobs = step.samples[3].rollout_logprobs = []
    check(step, replace(VARIANTS[variant], loss_type=name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fipo", "real", "vespo")])
def test_a_completion_cut_into_sequences_has_the_same_loss_and_gradient(name: str) -> None:
    whole = make_step([9, 4, 6, 5])
    numbered, logprobs, entropies = list[Sample](), list[list[float]](), list[list[float]]()
    for number, sample in enumerate(whole.samples):
        for part in (slice(0, 3), slice(3, None)):
            old, ref, rollout = sample.old_logprobs, sample.ref_logprobs, sample.rollout_logprobs
            assert old is not None and ref is not None and rollout is not None
            logprobs.append(whole.logprobs[number][part])
            entropies.append(whole.entropies[number][part])
            trained = len(logprobs[-1])
            numbered.append(
                replace(sample, completion=number, tokens=[1] * (2 + trained), old_logprobs=old[part],
                        completion_mask=[False] * 2 + [True] * trained, ref_logprobs=ref[part],
                        rollout_logprobs=rollout[part])
            )  # fmt: skip
    config = replace(PLAIN, loss_type=name)
    cut, once = run(Step(numbered, logprobs, entropies), config), run(whole, config)
    assert cut.loss == pytest.approx(once.loss, rel=1e-5)
    for number in range(len(whole.samples)):
        joined = cut.gradients[2 * number] + cut.gradients[2 * number + 1]
        assert joined == pytest.approx(once.gradients[number], rel=1e-4, abs=1e-7)


def test_delta_and_dual_clip_are_the_same_bound_where_both_apply() -> None:
    step = make_step([8, 8, 8, 8], drift=1.0)
    two_sided, dual = run(step, VARIANTS["delta"]), run(step, replace(PLAIN, dual_clip=1.5))
    assert two_sided.loss == pytest.approx(dual.loss, rel=1e-6)
    assert two_sided.loss < run(step, PLAIN).loss  # the bound was reached


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-2, 2), min_size=7, max_size=7), min_size=1, max_size=3), st.floats(0.1, 1.0))
def test_the_discounted_sum_equals_a_loop(rows: list[list[float]], gamma: float) -> None:
    expected = [[sum(gamma ** (k - t) * row[k] for k in range(t, 7)) for t in range(7)] for row in rows]
    sums = discounted_future_sum(torch.tensor(rows, dtype=torch.float64), gamma)
    assert sums.flatten().tolist() == pytest.approx([x for row in expected for x in row], rel=1e-9, abs=1e-9)


# ---- independence of packing


@st.composite
def steps_in_micro_batches(draw: st.DrawFn) -> tuple[Step, list[list[int]]]:
    """Draw a step, shuffled, in micro batches of whole groups."""
    lengths = draw(st.lists(st.integers(0, 8), min_size=2 * GROUP, max_size=4 * GROUP).filter(any))
    lengths = lengths[: len(lengths) // GROUP * GROUP]
    if not any(lengths):
        lengths[0] = 1
    rng = draw(st.randoms(use_true_random=False))
    groups = [list(range(start, start + GROUP)) for start in range(0, len(lengths), GROUP)]
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    cut = rng.randint(1, len(groups) - 1)
    return make_step(lengths, seed=rng.randint(0, 99)), [
        [i for g in part for i in g] for part in (groups[:cut], groups[cut:])
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_loss_gradient_and_metrics_do_not_depend_on_packing(name: str, data: st.DataObject) -> None:
    """They do not depend on the assignment to ranks either: shares of ranks add up like those of micro batches."""
    step, micro_batches = data.draw(steps_in_micro_batches())
    variant = data.draw(st.sampled_from(sorted(VARIANTS)))
    config = replace(VARIANTS[variant], loss_type=name)
    if name != "real":  # real needs whole groups in a micro batch
        micro_batches = [micro_batches[0][:-1], [micro_batches[0][-1], *micro_batches[1]]]
    whole, split = run(step, config), run(step, config, micro_batches)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
    assert effective_sample_size(split.metrics) == pytest.approx(
        effective_sample_size(whole.metrics), rel=1e-4, abs=1e-6
    )
    for i, gradient in whole.gradients.items():
        assert split.gradients[i] == pytest.approx(gradient, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_trained_tokens_changes_nothing(name: str) -> None:
    step = make_step([4, 3, 5, 2])
    empty = Sample([1, 1], [False, False], advantage=9.0, old_logprobs=[], ref_logprobs=[], rollout_logprobs=[])
    longer = Step([*step.samples, empty], [*step.logprobs, []], [*step.entropies, []])
    config = replace(
        PLAIN,
        loss_type=name,
        correction=replace(
            CORRECTION, rollout_importance_sampling_mode="sequence_mask", off_policy_sequence_mask_delta=0.1
        ),
    )
    assert run(longer, config).loss == pytest.approx(run(step, config).loss, abs=1e-7)
    assert run(longer, config).metrics == pytest.approx(run(step, config).metrics, abs=1e-6)


# ---- extremes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_log_probs_and_lengths_cause_no_nan(name: str, variant: str, advantage: float) -> None:
    step = make_step([1, 0, 3, 2])
    for sample in step.samples:
        sample.advantage = advantage
    step.samples[3].advantage = -advantage
    for now, old, reference_, rollout in (
        ([-1e4], [-1e-3], [-1e-3], [-1e-3]),
        ([-1e-3], [-1e4], [-1e4], [-1e4]),
    ):
        step.logprobs[0], step.samples[0].old_logprobs = now, old
        step.samples[0].ref_logprobs, step.samples[0].rollout_logprobs = reference_, rollout
        result = run(step, replace(VARIANTS[variant], loss_type=name))
        assert math.isfinite(result.loss)
        assert all(map(math.isfinite, (g for gradient in result.gradients.values() for g in gradient)))
        assert all(map(math.isfinite, result.metrics.values()))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_trained_tokens_has_loss_zero(name: str) -> None:
    step = make_step([0, 0, 0, 0])
    for sample in step.samples:
        sample.left_out = 3
    config = replace(
        PLAIN,
        loss_type=name,
        correction=replace(
            CORRECTION, rollout_importance_sampling_mode="token_mask", off_policy_sequence_mask_delta=0.1
        ),
    )
    result = run(step, config)
    assert result.loss == 0.0
    ends = ("_max", "_min")
    finite = {n: v for n, v in effective_sample_size(result.metrics).items() if not n.endswith(ends)}
    assert all(v == 0.0 for v in finite.values())
    assert all(math.isinf(v) for n, v in result.metrics.items() if n.endswith(ends))  # the engine leaves these out


def test_correction_without_the_engines_log_probs_is_refused() -> None:
    step = make_step([2, 2])
    for sample in step.samples:
        sample.rollout_logprobs = None
    with pytest.raises(ValueError, match="token_mask needs the engine's log-probs"):
        run(step, VARIANTS["token_mask"])


# ---- metrics


def test_clipped_tokens_are_those_whose_gradient_clipping_removes() -> None:
    high = Sample([1, 1, 1], [False, True, True], advantage=1.0, old_logprobs=[-2.0, -2.0])
    low = Sample([1, 1], [False, True], advantage=-1.0, old_logprobs=[-1.0], group=1)
    step = Step([high, low], [[-1.0, -2.0], [-3.0]], [[0.0, 0.0], [0.0]])  # ratios e (clipped), 1 and e^-2 (clipped)
    result = run(step, LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.2, beta=0.0))
    assert result.gradients == {0: [0.0, pytest.approx(-0.25)], 1: [0.0]}
    third = pytest.approx(1 / 3)
    assert result.metrics["clip_ratio/high_mean"] == result.metrics["clip_ratio/low_mean"] == third
    assert result.metrics["clip_ratio/region_mean"] == result.metrics["actor/clipfrac"] == pytest.approx(2 / 3)
    assert result.metrics["clip_ratio/high_max"] == 0.5 and result.metrics["clip_ratio/low_min"] == 0.0


def test_entropy_is_reported_over_completions() -> None:
    step = make_step([4, 0, 2])
    means = [sum(values) / len(values) for values in step.entropies if values]
    metrics = run(step, PLAIN).metrics
    assert metrics["entropy/entropy_mean"] == pytest.approx(sum(means) / 2)
    assert metrics["entropy/entropy_max"] == pytest.approx(max(means))
    assert metrics["entropy/entropy_min"] == pytest.approx(min(means))


def test_effective_sample_size_is_computed_over_the_whole_step() -> None:
    step = make_step([6, 3, 8, 2], drift=0.8)
    config = VARIANTS["token_truncate"]
    whole = effective_sample_size(run(step, config, [[0], [1, 2], [3]]).metrics)
    rho = [
        min(max(math.exp(o - r), 1 / 1.1), 1.1)
        for s in step.samples
        for o, r in zip(s.old_logprobs or [], s.rollout_logprobs or [], strict=True)
    ]
    expected = (sum(rho) / len(rho)) ** 2 / (sum(x * x for x in rho) / len(rho))
    assert whole["rollout_correction/ess"] == pytest.approx(expected, rel=1e-5)
    assert not any("ess_" in name for name in whole)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_corrected_kl_has_the_gradient_of_the_kl_itself(corrected: bool) -> None:
    """Tokens of an older policy, in expectation: the sum over a small vocabulary, each token by its old probability."""
    generator = torch.Generator().manual_seed(3)
    logits, old, base = torch.randn(3, 6, generator=generator, dtype=torch.float64).unbind()
    logits.requires_grad_()
    now = logits.log_softmax(0)
    kl = (now.exp() * (now - base.log_softmax(0))).sum()
    [exact] = torch.autograd.grad(kl, logits, retain_graph=True)
    config = replace(PLAIN, beta=1.0, use_bias_correction_kl=corrected, loss_type="dapo")
    expected, gradient = 0.0, torch.zeros(6, dtype=torch.float64)
    for token, probability in enumerate(old.softmax(0).tolist()):
        values = [[float(of.log_softmax(0)[token].detach())] for of in (logits, old, base)]
        sample = Sample([1, 1], [False, True], 0.0, 0, old_logprobs=values[1], ref_logprobs=values[2])
        result = run(Step([sample], [values[0]], [[1.0]]), config)
        expected += probability * result.loss
        gradient += probability * result.gradients[0][0] * torch.autograd.grad(now[token], logits, retain_graph=True)[0]
    assert (gradient.tolist() == pytest.approx(exact.tolist(), abs=1e-6)) == corrected
    assert (expected == pytest.approx(float(kl.detach()), abs=1e-6)) == corrected


@dataclass(frozen=True)
class Taught:
    """A step whose importance ratios are 1, and the same values as ms-swift takes them."""

    step: Step
    ratios: list[list[float]]
    advantages: torch.Tensor
    mask: torch.Tensor
    teacher: torch.Tensor
    policy: torch.Tensor


def taught_step() -> Taught:
    step = make_step([3, 5, 2, 4], seed=3)
    ratios = [[0.3 * t - 0.5 for t in range(len(values))] for values in step.logprobs]
    mask = torch.zeros(4, 5)
    teacher, policy = torch.zeros(4, 5), torch.zeros(4, 5)
    for i, sample in enumerate(step.samples):
        sample.old_logprobs, sample.teacher_ratios = list(step.logprobs[i]), ratios[i]
        length = len(ratios[i])
        mask[i, :length] = 1
        policy[i, :length] = torch.tensor(step.logprobs[i])
        teacher[i, :length] = policy[i, :length] + torch.tensor(ratios[i])
    advantages = torch.tensor([sample.advantage for sample in step.samples])
    return Taught(step, ratios, advantages, mask, teacher, policy)


def check_advantages(step: Step, config: LossConfig, expected: torch.Tensor) -> dict[str, float]:
    """Compare the gradients with the advantages of ms-swift's package, and return the metrics."""
    result = run(step, replace(config, loss_type="dapo", beta=0.0), [[0, 1], [2, 3]])
    for i, gradient in result.gradients.items():
        wanted = (-expected[i, : len(gradient)] / 14).tolist()  # of -r A, over all tokens
        assert gradient == pytest.approx(wanted, abs=1e-6)
    return result.metrics


def test_a_teacher_adds_its_log_ratio_to_the_advantage_of_each_token() -> None:
    it = taught_step()
    expected = expand_advantage_to_per_token(it.advantages, it.mask, it.teacher, it.policy, teacher_kl_coef=0.7)
    metrics = check_advantages(it.step, replace(PLAIN, teacher_kl_coef=0.7), expected)
    kl = [math.exp(ratio) - ratio - 1 for row in it.ratios for ratio in row]
    assert metrics["teacher_kl"] == pytest.approx(sum(kl) / 14, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_sdar_adds_ms_swifts_loss_to_every_loss(name: str) -> None:
    it = taught_step()
    plain = replace(PLAIN, loss_type=name, beta=0.0)
    without = run(it.step, replace(plain, teacher_kl_coef=0.0))
    for sample, row in zip(it.step.samples, it.teacher.tolist(), strict=True):
        sample.teacher_ratios, sample.teacher_logprobs = None, row[: sum(sample.completion_mask)]
    now = it.policy.clone().requires_grad_()
    expected, metrics = compute_sdar_loss(now, it.teacher, it.mask, gate_beta=3.0)
    expected.backward()
    ours = run(it.step, replace(plain, sdar=Sdar(sdar_loss_coef=0.2, sdar_gate_beta=3.0)))
    assert ours.loss - without.loss == pytest.approx(0.2 * expected.item(), abs=1e-6)
    assert {name: ours.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    assert abs(expected.item()) > 0.01 and ours.metrics["teacher_kl"] == pytest.approx(without.metrics["teacher_kl"])
    for i, gradient in ours.gradients.items():
        wanted = [0.2 * value for value in now.grad[i, : len(gradient)].tolist()]  # type: ignore[index]
        assert [a - b for a, b in zip(gradient, without.gradients[i], strict=True)] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("negative_only", [False, True])
def test_rlsd_weights_advantages_as_ms_swift_does(negative_only: bool) -> None:
    it = taught_step()
    it.step.samples[2].advantage, it.advantages[2] = 0.0, 0.0
    assert {-1.0, 0.0, 1.0} == set(it.advantages.sign().tolist())
    rlsd = Rlsd(advantage_reweight="rlsd", rlsd_lambda=0.7, rlsd_reweight_clip_range=0.3,
                rlsd_negative_only=negative_only)  # fmt: skip
    expected = apply_rlsd_reweight(it.advantages, it.mask, it.teacher, it.policy, 0.7, 0.3, negative_only)
    assert "teacher_kl" in check_advantages(it.step, replace(PLAIN, rlsd=rlsd), expected)
