"""ms-swift's own loss_func on all cases, printed as JSON.

`main` runs in a separate process, because ms-swift needs initialized process groups.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import defaultdict
from typing import Any

import torch
from megatron.core import mpu
from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer as Stock
from swift.rl_core.data import GRPOBatch

from swift_megatron_grpo.settings.losses import LossConfig
from tests.support.loss_cases import CASES, GROUP, LENGTHS, LIMIT, Case
from tests.unit.training.loss.losses import Step, make_step


def grid(rows: list[list[float]], fill: float = 0.0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def trainer(config: LossConfig, case: Case, sequences: int) -> Any:
    """Return ms-swift's trainer without a model, with the attributes that its loss_func reads."""
    stock = object.__new__(Stock)
    settings = {
        "args": Namespace(overlong_filter=case.overlong_filter, delta=config.delta, num_microbatches=1),
        "micro_batch_size": sequences, "num_generations": GROUP, "max_completion_length": LIMIT,
        "loss_type": config.name, "beta": config.kl_weight, "kl_in_reward": False, "temperature": 1.0,
        "importance_sampling_level": config.importance_sampling_level, "epsilon_low": config.epsilon,
        "epsilon_high": config.high, "real_tau": config.real_tau,
        **vars(config.sapo), **vars(config.fipo), "fipo_gamma": 2 ** (-1 / config.fipo.fipo_decay_rate),
        "log_entropy": config.log_entropy, "top_entropy_quantile": case.quantile, "compute_entropy": True,
        **vars(config.correction), "disable_rollout_importance_sampling": False,
        "_metrics": {"train": defaultdict(list)}, "unwrapped_models": [torch.nn.Linear(1, 1)],
        "_step": 2, "steps_per_generation": 2, "use_teacher_api": False,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(stock, name, value)
    return stock


def stock_step(case: Case, step: Step) -> dict[str, Any]:
    config, samples = case.config, step.samples
    mask = grid([[1.0] * n for n in LENGTHS]).bool()
    batch = GRPOBatch(
        completion_mask=mask,
        truncated_mask=torch.tensor([i in case.truncated for i in range(len(samples))]),
        seq_lengths=torch.tensor(LENGTHS),
        old_per_token_logps=grid([s.old_logprobs or [] for s in samples]),
        ref_per_token_logps=grid([s.ref_logprobs or [] for s in samples]),
        rollout_per_token_logps=grid([s.rollout_logprobs or [] for s in samples]),
        advantages=grid([[s.advantage] * n for s, n in zip(samples, LENGTHS, strict=True)]),
        num_items_in_batch=torch.tensor(float(sum(LENGTHS))),
    )
    now = grid(step.logprobs).requires_grad_()
    entropies = grid(step.entropies, fill=float("nan"))
    data = {"grpo_batch": batch, "per_token_entropy": entropies}
    loss, metrics = Stock.loss_func.__wrapped__(trainer(config, case, len(samples)), now, data)
    loss.backward()
    return {
        "loss": loss.item(),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "gradients": [row[:n].tolist() for row, n in zip(now.grad, LENGTHS, strict=True)],
    }


def main() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    Stock._has_teacher = False
    results = {name: stock_step(case, make_step(LENGTHS, seed=case.seed)) for name, case in CASES.items()}
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
