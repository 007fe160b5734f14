"""For any number of ranks: one step of every loss, and what is computed once per step, on the same samples."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.tools.check_layouts import Variant, fixed_samples

SAMPLES, GROUP = 16, 4


def main(out: str, flags: list[str], layout: str) -> None:
    """Metrics of every step go to OUT.LAYOUT.json. The learning rate must be too small to move a weight."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer = MegatronRLHF([*flags, *Variant.parse(layout).flags()]).prepare_trainer()
    trainer.setup_model_training()
    engine = trainer.build_engine()
    samples = make_samples(engine, trainer.config.padded_vocab_size)
    told = {name: engine.train_step(samples, *loss) for name, loss in make_losses().items()}
    told["once"] = once_per_step(engine, samples)
    told["selected"] = engine.train_step(samples, *make_losses()["dapo"])  # of the tokens that were selected
    if torch.distributed.get_rank() == 0:
        Path(f"{out}.{layout}.json").write_text(json.dumps(told))


def make_losses() -> dict[str, Any]:
    from swift_megatron_grpo.config import CorrectionConfig, LossConfig
    from swift_megatron_grpo.training.loss import LOSSES, make_loss

    correction = CorrectionConfig("token_truncate", 1.2, log_metrics=True)
    plain = LossConfig("grpo", 0.2, 0.3, 0.1, 0.9, log_entropy=True, max_completion_length=32, correction=correction)
    configs = {name: replace(plain, name=name) for name in LOSSES}
    configs["real"] = replace(configs["real"], correction=CorrectionConfig(mask_delta=0.01))
    configs["gspo"] = replace(plain, level="sequence", entropy_coef=0.01)
    configs["sequence_mask"] = replace(plain, correction=replace(correction, mode="sequence_mask", mask_delta=0.05))
    return {name: (make_loss(config), ("logprob", "entropy")) for name, config in configs.items()}


def make_samples(engine: Any, vocab_size: int) -> list[Any]:
    """Off-policy, with one completion left out and one dropped."""
    samples = fixed_samples(vocab_size, SAMPLES, seed=3, policies_given=True)
    rng = random.Random(5)
    for i, sample in enumerate(samples):
        sample.group = i // GROUP
        sample.rollout_logprobs = [value + rng.gauss(0, 0.2) for value in sample.old_logprobs or []]
    for sample, left_out in ((samples[6], sum(samples[6].completion_mask)), (samples[9], 0)):
        sample.completion_mask, sample.left_out = [False] * len(sample.tokens), left_out
        sample.old_logprobs = sample.ref_logprobs = sample.rollout_logprobs = []
    return samples


def once_per_step(engine: Any, samples: list[Any]) -> dict[str, float]:
    """The entropy threshold and the KL of completions, as the loop finds them. Selects tokens."""
    from swift_megatron_grpo.loop.kl_controller import divergences
    from swift_megatron_grpo.loop.token_selection import entropy_threshold, select_tokens
    from swift_megatron_grpo.parallel import Coordinator
    from swift_megatron_grpo.types import TokenValues

    coordinator = Coordinator(timedelta(minutes=1))
    values = engine.infer(samples, ("logprob", "entropy"))
    entropies = coordinator.gather_samples(
        {i: np.asarray(each.entropies, np.float32) for i, each in values.items()}, engine.parallel
    )
    threshold = entropy_threshold(entropies.values(), 0.4)
    for i, each in entropies.items():
        select_tokens(samples[i], each, threshold)
    reference = {i: TokenValues(samples[i].ref_logprobs, None) for i in values}
    kls = coordinator.gather_samples(divergences(values, reference, "k1"), engine.parallel)
    assert sorted(kls) == sorted(entropies) == list(range(len(samples)))
    share = sum(sum(sample.selected) for sample in samples) / sum(map(len, entropies.values()))
    return {"threshold": threshold, "share": share, **{f"kl of {i}": kls[i] for i in range(len(samples))}}
