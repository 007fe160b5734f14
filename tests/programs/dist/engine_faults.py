"""Run a step with a NaN loss on two ranks, which must not update anything, a good one, and one that breaks a weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples


def main(out: str, flags: list[str]) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training.engine import NonFiniteStep, NonFiniteWeights
    from swift_megatron_grpo.training.loss import make_loss

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    engine = trainer.build_engine()
    loss = make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.2, beta=0.0))
    before = [p.detach().clone() for p in trainer.unwrapped_models[0].parameters()]

    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    assert samples[5].old_logprobs is not None
    samples[5].old_logprobs[0] = math.nan
    report = {}
    try:
        engine.train_step(samples, loss)
    except NonFiniteStep as error:
        report["nan"] = str(error)
    after = list(trainer.unwrapped_models[0].parameters())
    report["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    good = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    report["after"] = engine.train_step(good, loss)["grad_norm"]
    report["changed"] = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    if torch.distributed.get_rank() == 1:  # as an optimizer state that was damaged on its way to a checkpoint
        spoil_state_of(engine, trainer.unwrapped_models[0].decoder.final_layernorm.weight)
    try:
        engine.train_step(good, loss)
    except NonFiniteWeights as error:
        report["weights"] = str(error)
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def spoil_state_of(engine: Any, weight: Any) -> None:
    [optimizer] = engine.optimizer.chained_optimizers
    optimizer.optimizer.state[weight.main_param]["exp_avg"][0] = math.nan
