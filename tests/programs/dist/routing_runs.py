"""Training with a given routing, and passes that record and replay it, on the ranks of tests/dist/conftest.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.types import Sample
from tests.programs.dist.engine_runs import make_loss, make_trainer


def given_routing(samples: list[Sample], layers: int, experts: int, k: int, seed: int) -> None:
    """Give samples random experts: of all tokens but the last, of a half, of none; and -1 in some rows."""
    rng = np.random.default_rng(seed)
    for number, sample in enumerate(samples):
        count = (len(sample.tokens) - 1, len(sample.tokens) // 2, 0)[number % 3]
        rows = rng.permuted(np.tile(np.arange(experts, dtype=np.int16), (count, layers, 1)), axis=2)[..., :k]
        rows[1::5] = -1
        sample.routed_experts = rows if count else None


def run_layout(name: str, flags: list[str], folder: str) -> None:
    """Train two steps with a given routing; then record a pass without one, and replay it."""
    from swift_megatron_grpo.training.trained_weights import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = make_trainer([*flags, *Variant.parse(name).flags()])
    engine, loss, config = trainer.build_engine(), make_loss(), trainer.config
    metrics = []
    for number in (1, 2):
        samples = fixed_samples(config.padded_vocab_size, 8, seed=number)
        given_routing(samples, config.num_layers, config.num_moe_experts, config.moe_router_topk, seed=number)
        for index, values in engine.infer(samples).items():
            samples[index].ref_logprobs = values.logprobs
            samples[index].old_logprobs = values.logprobs if number == 2 else None
        metrics.append(engine.train_step(samples, loss))
    recorded = _record_and_replay(engine, fixed_samples(config.padded_vocab_size, 8, seed=3))
    gather_parameters(trainer.wrapped_models)
    weights = {
        key: tensor.clone().float().cpu() for key, tensor in export_weights(trainer.bridge, trainer.unwrapped_models)
    }
    rank = torch.distributed.get_rank()
    torch.save(recorded, Path(folder, f"{name}.recorded.{rank}.pt"))
    if rank == 0:
        path = str(Path(folder, f"{name}.pt"))
        torch.save(weights, path)
        report = {"layout": name, "metrics": metrics, "weights": path, "seconds": 0.0}
        Path(folder, f"{name}.json").write_text(json.dumps(report))


def _record_and_replay(engine: Any, samples: list[Sample]) -> dict[str, Any]:
    """Return log-probs and experts of a recorded pass, and of two that replay it: as it is, and with moved routers."""
    logprobs, rows = engine.infer_and_record(samples)
    given = [replace(sample, routed_experts=rows.get(index)) for index, sample in enumerate(samples)]
    replayed, same = engine.passes.infer_and_record(given)
    with torch.no_grad():
        for model in engine.passes.models:
            for parameter_name, parameter in model.named_parameters():
                if "router" in parameter_name:
                    generator = torch.Generator().manual_seed(parameter.shape[0])
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
    moved, own = engine.infer_and_record(samples)
    held, kept = engine.infer_and_record(given)
    return {
        "logprobs": _values(logprobs),
        "replayed": _values(replayed),
        "moved": _values(moved),
        "held": _values(held),
        "rows": rows,
        "same": same,
        "own": own,
        "kept": kept,
    }


def _values(values: dict[int, Any]) -> dict[int, list[float]]:
    return {index: value.logprobs for index, value in values.items()}
