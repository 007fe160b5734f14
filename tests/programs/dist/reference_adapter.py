"""Reference log-probs of a second adapter, on the ranks that tests/dist/conftest.py starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.weights.export.export import export_weights
from tests.programs.dist.engine_runs import make_loss, make_reference, make_trainer, write_report


def main(out: str, flags: list[str], policy: str, reference: str) -> None:
    """Compare the reference with the policy of the same adapter, before and after a step of another adapter."""
    trainer = make_trainer([*flags, "--adapters", reference])
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    expected = of_samples(trainer.build_engine().infer(samples))

    trainer = make_trainer([*flags, "--adapters", policy, "--ref_adapters", reference])
    engine = trainer.build_engine()
    frozen = make_reference(trainer, engine)
    trained = {name for name, parameter in parameters(trainer).items() if parameter.requires_grad}
    before = exported(trainer)
    report: dict[str, Any] = {
        "expected": expected,
        "reference": of_samples(frozen.infer(samples)),
        "policy": of_samples(engine.infer(samples)),
        "same_export": same(before, exported(trainer)),
        "same_trained": trained == {name for name, p in parameters(trainer).items() if p.requires_grad},
        "trained_of_reference": [name for name in trained if "ref_adapter" in name],
    }
    engine.train_step([replace(sample) for sample in samples], make_loss())
    report["export_moved"] = not same(before, exported(trainer))
    report["reference_after"] = of_samples(frozen.infer(samples))
    write_report(out, report)


def parameters(trainer: Any) -> dict[str, torch.nn.Parameter]:
    return {f"{i}.{n}": p for i, model in enumerate(trainer.unwrapped_models) for n, p in model.named_parameters()}


def exported(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_weights(trainer.bridge, trainer.unwrapped_models)}


def same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return set(some) == set(others) and all(torch.equal(some[name], others[name]) for name in some)


def of_samples(values: Mapping[int, Any]) -> dict[str, list[float]]:
    return {str(index): value.logprobs for index, value in values.items()}
