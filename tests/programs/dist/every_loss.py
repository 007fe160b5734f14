"""Run one step of every loss, and the computations done once per step, on the same samples and any number of ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples

SAMPLES, GROUP = 16, 4
MU = 0.3  # share of the answers in the loss
QUANTILE = 0.38  # of tokens, by entropy; no entropy is near the threshold


def main(out: str, flags: list[str], layout: str) -> None:
    """Write the metrics of every step to OUT.LAYOUT.json. The learning rate must be too small to change a weight."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.training.loss import with_answers

    trainer = MegatronRLHF([*flags, *Variant.parse(layout).flags()]).prepare_trainer()
    trainer.setup_model_training()
    engine = trainer.build_engine()
    samples = make_samples(engine, trainer.config.padded_vocab_size)
    losses = make_losses()
    report = {name: engine.train_step(samples, *loss) for name, loss in losses.items()}
    report |= {name: engine.train_step(with_teacher(samples), *loss) for name, loss in make_taught_losses().items()}
    answers = make_answers(trainer.config.padded_vocab_size)
    loss, outputs = losses["dapo"]
    report["answers"] = engine.train_step([*samples, *answers], with_answers(loss, MU, phi=False), outputs)
    report["nll of answers"] = {"mean": nll_without_temperature(engine, answers)}
    report["once"] = once_per_step(engine, samples)
    report["selected"] = engine.train_step(samples, *make_losses()["dapo"])  # only of the selected tokens
    if torch.distributed.get_rank() == 0:
        Path(f"{out}.{layout}.json").write_text(json.dumps(report))


def make_answers(vocab_size: int) -> list[Any]:
    """Return as many answers for SFT as there are completions, each a group of its own."""
    samples = fixed_samples(vocab_size, SAMPLES, seed=8)
    return [replace(s, group=-1 - i, sft_weights=[1.0] * sum(s.completion_mask)) for i, s in enumerate(samples)]


def nll_without_temperature(engine: Any, answers: list[Any]) -> float:
    """Return the mean loss of a token of the answers, from a pass at a temperature of 1."""
    from swift_megatron_grpo.runtime.parallel import Coordinator

    settings = engine.passes.settings
    assert settings.temperature != 1
    engine.passes.settings = replace(settings, temperature=1.0)
    values = engine.infer([replace(sample, sft_weights=None) for sample in answers])
    engine.passes.settings = settings
    sums = {index: np.asarray(value.logprobs) for index, value in values.items()}
    gathered = Coordinator(timedelta(minutes=1)).gather_samples(sums, engine.parallel)
    return float(-np.concatenate(list(gathered.values())).mean())


def make_losses() -> dict[str, Any]:
    from swift_megatron_grpo.settings.losses import Correction, LossConfig
    from swift_megatron_grpo.training.loss import LOSSES, make_loss

    correction = Correction(
        rollout_importance_sampling_mode="token_truncate",
        rollout_importance_sampling_threshold=1.2,
        log_rollout_offpolicy_metrics=True,
    )
    plain = LossConfig(
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.3,
        beta=0.1,
        log_entropy=True,
        max_completion_length=32,
        correction=correction,
    )
    configs = {name: replace(plain, loss_type=name) for name in LOSSES}
    configs["real"] = replace(configs["real"], correction=Correction(off_policy_sequence_mask_delta=0.01))
    configs["gspo"] = replace(plain, importance_sampling_level="sequence", entropy_coef=0.01)
    masked = replace(correction, rollout_importance_sampling_mode="sequence_mask", off_policy_sequence_mask_delta=0.05)
    configs["sequence_mask"] = replace(plain, correction=masked)
    return {name: (make_loss(config), ("logprob", "entropy")) for name, config in configs.items()}


def make_taught_losses() -> dict[str, Any]:
    from swift_megatron_grpo.settings.distillation import Rlsd, Sdar
    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training.loss import make_loss

    plain = LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.3, beta=0.0)
    configs = {
        "rlsd": replace(plain, rlsd=Rlsd(advantage_reweight="rlsd")),
        "sdar": replace(plain, sdar=Sdar(sdar_loss_coef=0.1)),
    }
    return {name: (make_loss(config), ("logprob",)) for name, config in configs.items()}


def with_teacher(samples: list[Any]) -> list[Any]:
    rng = random.Random(7)
    ratios = [[rng.gauss(0, 0.5) for _ in sample.old_logprobs] for sample in samples]
    return [
        replace(
            sample,
            teacher_ratios=gaps,
            teacher_logprobs=[a + b for a, b in zip(sample.old_logprobs, gaps, strict=True)],
        )
        for sample, gaps in zip(samples, ratios, strict=True)
    ]


def make_samples(engine: Any, vocab_size: int) -> list[Any]:
    """Return off-policy samples; one completion is excluded from the loss and one dropped."""
    samples = fixed_samples(vocab_size, SAMPLES, seed=3, policies_given=True, one_prompt=True)
    rng = random.Random(5)
    for i, sample in enumerate(samples):
        sample.group = i // GROUP
        sample.rollout_logprobs = [value + rng.gauss(0, 0.2) for value in sample.old_logprobs or []]
    for sample, left_out in ((samples[6], sum(samples[6].completion_mask)), (samples[9], 0)):
        sample.completion_mask, sample.left_out = [False] * len(sample.tokens), left_out
        sample.old_logprobs = sample.ref_logprobs = sample.rollout_logprobs = []
    return samples


def once_per_step(engine: Any, samples: list[Any]) -> dict[str, float]:
    """Select tokens, and return the entropy threshold and the KL of completions, computed as in the loop."""
    from swift_megatron_grpo.grading.token_baselines import energies, token_advantages
    from swift_megatron_grpo.loop.samples import entropy_threshold, select_tokens
    from swift_megatron_grpo.runtime.parallel import Coordinator
    from swift_megatron_grpo.training.loss.kl import divergences
    from swift_megatron_grpo.types import TokenValues

    coordinator = Coordinator(timedelta(minutes=1))
    values = engine.infer(samples, ("logprob", "entropy"))
    entropies = coordinator.gather_samples(
        {i: np.asarray(value.entropies, np.float32) for i, value in values.items()}, engine.parallel
    )
    threshold = entropy_threshold(entropies.values(), QUANTILE)
    margin = np.abs(np.concatenate(list(entropies.values())) - threshold).min()
    assert margin > 2e-6, f"the threshold is {margin} from an entropy, so rounding selects tokens; use another QUANTILE"
    for i, token_entropies in entropies.items():
        select_tokens(samples[i], token_entropies, threshold)
    reference = {i: TokenValues(samples[i].ref_logprobs, None) for i in values}
    kls = coordinator.gather_samples(divergences(values, reference, "k1"), engine.parallel)
    assert sorted(kls) == sorted(entropies) == list(range(len(samples)))
    share = sum(sum(sample.selected) for sample in samples) / sum(map(len, entropies.values()))
    sharper = engine.infer(samples, temperature=engine.passes.settings.temperature / 2)
    held = {i: energies(value.logprobs, sharper[i].logprobs) for i, value in values.items()}
    energy = coordinator.gather_samples(held, engine.parallel)
    baselines = token_advantages([float(i) for i in range(GROUP)], [energy[i] for i in range(GROUP)])
    advantages = {f"advantage of {i}": sum(of_tokens) for i, of_tokens in enumerate(baselines)}
    return {"threshold": threshold, "share": share, **advantages, **{f"kl of {i}": kls[i] for i in range(len(samples))}}
