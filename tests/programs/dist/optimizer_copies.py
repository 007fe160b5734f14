"""Run the same steps with Megatron's copies of gradients and results, and with this package's, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from swift_megatron_grpo.cli.check_layouts.torn_down import megatron_torn_down
from swift_megatron_grpo.training.optimizer import optimizer_copies
from tests.programs.dist.flat_optimizer import upstream_tensors
from tests.programs.dist.offloading import EVERYTHING, STEPS, Run, differing


def main(out: str, flags: list[str]) -> None:
    with upstream_tensors():
        run(out, flags)


def run(out: str, flags: list[str]) -> None:
    stock = Run(flags, EVERYTHING)
    with upstream_copies():
        expected = [stock.step(seed) for seed in range(STEPS)]
    with megatron_torn_down():
        del stock
    ours = Run(flags, EVERYTHING)
    actual = [ours.step(seed) for seed in range(STEPS)]
    optimizers = [places.mains for places in optimizer_copies._places.values()]
    report: dict[str, Any] = {
        "metrics_equal": [a.metrics == b.metrics for a, b in zip(actual, expected, strict=True)],
        "weights_differ": sorted({n for a, b in zip(actual, expected, strict=True) for n in differing(a, b)}),
        "moved_by_training": len(differing(actual[0], actual[-1])),
        "copied_in_one_call": sum(len(mains) for mains in optimizers),
    }
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


@contextmanager
def upstream_copies() -> Iterator[None]:
    DistributedOptimizer._copy_model_grads_to_main_grads = optimizer_copies._upstream_gradients
    DistributedOptimizer._copy_main_params_to_model_params = optimizer_copies._upstream_results
    try:
        yield
    finally:
        assert not optimizer_copies._places
        optimizer_copies.copy_without_search()
