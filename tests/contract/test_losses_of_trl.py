"""TRL 0.29's own loss against ours on the same step in one micro batch: those that ms-swift does not have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swift_megatron_grpo.settings.losses import LossConfig
from tests.programs.contract.stock_losses import grid
from tests.support.loss_cases import LENGTHS, PLAIN
from tests.unit.training.loss.losses import Step, make_step, run

CASES = {
    "luspo": replace(PLAIN, loss_type="luspo", importance_sampling_level="sequence", beta=0.0),
    "corrected KL": replace(PLAIN, use_bias_correction_kl=True),
    "corrected KL of completions": replace(PLAIN, use_bias_correction_kl=True, importance_sampling_level="sequence"),
}


def loss_of_trl(step: Step, config: LossConfig) -> tuple[float, list[list[float]]]:
    """Run TRL's method on a trainer without a model; return the loss and its gradients by log-prob."""
    from trl import GRPOTrainer

    now = grid(step.logprobs).requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, grid(step.entropies)),
        model=torch.nn.Linear(1, 1), accelerator=SimpleNamespace(gather=lambda value: value, num_processes=1),
        args=SimpleNamespace(delta=config.delta, use_bias_correction_kl=config.use_bias_correction_kl),
        importance_sampling_level=config.importance_sampling_level, loss_type=config.name, beta=config.kl_weight,
        epsilon_low=config.epsilon, epsilon_high=config.high, max_completion_length=config.max_completion_length,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    mask = grid([[1.0] * n for n in LENGTHS])
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor([sample.advantage for sample in step.samples], dtype=torch.float64),
        "old_per_token_logps": grid([sample.old_logprobs or [] for sample in step.samples]),
        "ref_per_token_logps": grid([sample.ref_logprobs or [] for sample in step.samples]),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    assert now.grad is not None
    return loss.item(), [row[:n].tolist() for row, n in zip(now.grad, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_trl(name: str) -> None:
    step = make_step(LENGTHS, seed=4)
    expected, ours = loss_of_trl(step, CASES[name]), run(step, CASES[name])
    assert ours.loss == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    for i, gradient in ours.gradients.items():
        assert gradient == pytest.approx(expected[1][i], rel=1e-4, abs=1e-6)
