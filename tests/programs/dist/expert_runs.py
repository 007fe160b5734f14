"""Steps of a mixture of experts, with the products that its layers ran and the order of its gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def two_steps(out: str, flags: list[str]) -> None:
    """Train two steps, and count how many products took which way to a gradient."""
    from swift_megatron_grpo.training.moe import grouped_experts

    ways: Counter[str] = Counter()
    apply = grouped_experts.GroupedProduct.apply

    def count(x: Any, weight: Any, ends: Any, main_grad: Any, *parameters: Any) -> Any:
        way = "frozen" if not parameters else "returned" if main_grad is None else "added"
        ways[way if torch.is_grad_enabled() else "no gradient"] += 1
        return apply(x, weight, ends, main_grad, *parameters)

    grouped_experts.GroupedProduct.apply = count  # type: ignore[method-assign]
    try:
        trainer = make_trainer(flags)
        engine, loss = trainer.build_engine(), make_loss()
        metrics = []
        for seed in (1, 2):
            samples = fixed_samples(trainer.config.padded_vocab_size, 8, seed=seed, policies_given=True)
            metrics.append(engine.train_step(samples, loss))
    finally:
        grouped_experts.GroupedProduct.apply = apply  # type: ignore[method-assign]
    weights = {name: weight for model in trainer.unwrapped_models for name, weight in model.named_parameters()}
    places = {name: weight.main_grad.data_ptr() for name, weight in weights.items() if weight.requires_grad}
    firsts = [name for name in places if name.endswith("weight0")]
    ascending = {places[name] < places[name[:-1] + "1"] for name in firsts}  # in Megatron's buffer of gradients
    sums = {name: weight.double().square().sum().item() for name, weight in sorted(weights.items())}
    order = {"ascending": sorted(ascending), "experts_in_order": trainer.args.experts_in_order}
    write_report(out, {"metrics": metrics, "ways": dict(ways), "squares": sums, **order})
