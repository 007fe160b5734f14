"""CHORD against ms-swift's own code, on the same logits, and independent of packing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers.utils import compute_chord_loss, mu_schedule_function

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment, StepPlan
from swift_megatron_grpo.settings.chord import Chord
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss import TokenOutput, make_loss, with_answers
from swift_megatron_grpo.types import Sample
from tests.unit.settings.flags import faults
from tests.unit.training.loss.losses import CPU, make_step, run

CHORD = Chord(
    chord_sft_dataset=["a"], chord_sft_per_device_train_batch_size=1, chord_mu_warmup_steps=4, chord_mu_decay_steps=10,
    chord_mu_peak=0.9, chord_mu_valley=0.05,
)  # fmt: skip
SCHEDULES = [(4, 10, 0.9, 0.05), (0, 200, 0.5, 0.02), (0, 0, 0.9, 0.0), (3, 0, 1.0, 0.3)]
CONFIG = LossConfig(loss_type="grpo", beta=0.0)
# Two rows of ms-swift's micro batch: tokens, their labels, and weights as --loss_scale gives them.
TOKENS = torch.tensor([[1, 4, 2, 0, 3, 5], [3, 3, 1, 2, 0, 0]])
LABELS = torch.where(torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0]]) > 0, TOKENS, -100)
WEIGHTS = torch.tensor([[0, 0, 2.0, 0.5, 0, 1], [0, 1, 3, 1, 0, 0]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mu_is_that_of_ms_swift(schedule: tuple[int, int, float, float]) -> None:
    warmup, decay, peak, valley = schedule
    chord = replace(CHORD, chord_mu_warmup_steps=warmup, chord_mu_decay_steps=decay, chord_mu_peak=peak,
                    chord_mu_valley=valley)  # fmt: skip
    for step in range(20):
        assert chord.mu(step) == pytest.approx(mu_schedule_function(step, *schedule), abs=1e-12)
    assert replace(chord, chord_sft_dataset=None).mu(5) == 0


def of_ms_swift(logits: torch.Tensor, weights: torch.Tensor | None, phi: bool, step: int) -> torch.Tensor:
    """Run ms-swift's function on a trainer without a model, beside a loss of completions of 3."""
    inputs = {"labels": LABELS.clone()} | ({} if weights is None else {"loss_scale": weights.clone()})
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=step), chord_sft_iterator=iter([[]]),
        template=SimpleNamespace(data_collator=lambda rows: inputs), accelerator=SimpleNamespace(device="cpu"),
        model=lambda: SimpleNamespace(logits=logits),
        args=SimpleNamespace(chord_enable_phi_function=phi, chord_mu_warmup_steps=4, chord_mu_decay_steps=10,
                             chord_mu_peak=0.9, chord_mu_valley=0.05),
    )  # fmt: skip
    return compute_chord_loss(trainer, grpo_loss=torch.tensor(3.0))


def answers(weights: torch.Tensor | None) -> list[Sample]:
    masks = (LABELS != -100).tolist()
    of_tokens = torch.ones(LABELS.shape) if weights is None else weights
    return [
        Sample(tokens.tolist(), mask, 0.0, group=-1 - i, sft_weights=of_tokens[i][LABELS[i] != -100].tolist())
        for i, (tokens, mask) in enumerate(zip(TOKENS, masks, strict=True))
    ]


def sft_of(logits: torch.Tensor, samples: list[Sample], mu: float, phi: bool, batches: list[list[int]]) -> Any:
    """Return the share of the answers, summed over micro batches, and what it would be of a loss without them."""
    logprobs = logits.log_softmax(-1)
    total = torch.zeros(())
    for indices in batches:
        batch = collate(samples, indices, count(samples), Alignment(1, 1), 0, 1, CPU)
        places = [(i, t) for i in indices for t, trained in enumerate(samples[i].completion_mask) if trained]
        values = torch.stack([logprobs[i, t - 1, TOKENS[i, t]] for i, t in places])
        share, metrics = with_answers(make_loss(CONFIG), mu, phi)(batch, TokenOutput(values, None))
        assert metrics["chord/sft_loss"] * mu == pytest.approx(share.item())
        total = total + share
    return total


@pytest.mark.parametrize("phi", [True, False])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "loss_scale"])
@pytest.mark.parametrize("batches", [[[0, 1]], [[1], [0]]], ids=["one micro batch", "two"])
def test_loss_and_gradient_equal_those_of_ms_swift(
    weights: torch.Tensor | None, phi: bool, batches: list[list[int]]
) -> None:
    logits = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(1)) * 2
    for step in (1, 4, 9, 30):
        theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
        expected = of_ms_swift(theirs, weights, phi, step)
        mu = CHORD.mu(step)
        total = (1 - mu) * 3.0 + sft_of(ours, answers(weights), mu, phi, batches)
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        [wanted], [computed] = torch.autograd.grad(expected, theirs), torch.autograd.grad(total, ours)
        assert torch.allclose(computed, wanted, atol=1e-7)


def test_answers_change_no_number_of_the_completions() -> None:
    """Loss and gradients of completions are (1 - mu) times those of a step without answers, metrics the same."""
    step = make_step([5, 2, 4, 3])
    alone = run(step, CONFIG)
    samples = [*step.samples, *answers(None)]
    assert replace(count(samples), sft_tokens=0) == count(step.samples) and count(samples).sft_tokens == 6
    batch = collate(samples, range(4), count(samples), Alignment(1, 1), 0, 1, CPU)
    logprobs = torch.tensor([value for row in step.logprobs for value in row], requires_grad=True)
    entropy = torch.tensor([value for row in step.entropies for value in row])
    loss, metrics = with_answers(make_loss(CONFIG), 0.25, phi=True)(batch, TokenOutput(logprobs, entropy))
    loss.backward()
    assert loss.item() == pytest.approx(0.75 * alone.loss, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.75 * g for row in alone.gradients.values() for g in row])
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(alone.metrics)


def test_micro_batches_of_answers_follow_those_of_completions() -> None:
    completions = StepPlan((((0, 1), (2, 3)), ((4, 5), (6, 7))), over_budget=(3,), share_prompts=True)
    plan = completions.followed_by(StepPlan((((1,), (2,)), ((0,), (3,))), over_budget=(2,)), first=8)
    assert plan.assignment == (((0, 1), (2, 3), (9,), (10,)), ((4, 5), (6, 7), (8,), (11,)))
    assert plan.over_budget == (3, 10) and plan.share_prompts


def test_a_schedule_is_needed_in_full() -> None:
    message = faults(Chord, chord_sft_dataset=["a.jsonl"], chord_mu_peak=0.5, chord_mu_warmup_steps=3)
    assert "needs --chord_sft_per_device_train_batch_size, --chord_mu_decay_steps, --chord_mu_valley; use " in message
    assert message.endswith(
        "--chord_sft_per_device_train_batch_size 1 --chord_mu_decay_steps 200 --chord_mu_valley 0.05"
    )
    assert faults(Chord, chord_mu_peak=0.5) == ""
