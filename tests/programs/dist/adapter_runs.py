"""Steps of a model with adapters, with the products that its layers ran."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def two_steps(out: str, flags: list[str]) -> None:
    """Train two steps from a loaded adapter, and count how many products took which way to a gradient."""
    from swift_megatron_grpo.training.layers import adapter_layers
    from swift_megatron_grpo.training.upstream_fixes.adapter_settings import seed_adapter_dropout

    ways: Counter[str] = Counter()
    apply = adapter_layers.AdaptedProduct.apply
    experts = adapter_layers._experts

    def count(x: Any, weight: Any, bias: Any, down: Any, up: Any, scaling: float, gradients_have_hooks: bool) -> Any:
        way = "returned" if gradients_have_hooks else "added"
        ways[way if torch.is_grad_enabled() else "no gradient"] += 1
        ways["with bias"] += bias is not None
        return apply(x, weight, bias, down, up, scaling, gradients_have_hooks)

    def count_experts(module: Any, original: Any, x: Any, m_splits: Any) -> Any:
        ways["experts"] += 1
        return experts(module, original, x, m_splits)

    adapter_layers.AdaptedProduct.apply = count  # type: ignore[method-assign]
    adapter_layers._experts = count_experts
    try:
        trainer = make_trainer(flags)
        engine, loss = trainer.build_engine(), make_loss()
        metrics = []
        for seed in (1, 2):
            seed_adapter_dropout(0, seed)
            samples = fixed_samples(trainer.config.padded_vocab_size, 8, seed=seed, policies_given=True)
            metrics.append(engine.train_step(samples, loss))
    finally:
        adapter_layers.AdaptedProduct.apply = apply  # type: ignore[method-assign]
        adapter_layers._experts = experts
    weights = {name: weight for model in trainer.unwrapped_models for name, weight in model.named_parameters()}
    sums = {name: weight.double().square().sum().item() for name, weight in sorted(weights.items())}
    write_report(out, {"metrics": metrics, "ways": {way: n for way, n in ways.items() if n}, "squares": sums})
