"""Passes of a pipeline, with the number of shapes that its stages exchange in each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from swift_megatron_grpo.tools.check_layouts import fixed_samples
from swift_megatron_grpo.training import passes
from swift_megatron_grpo.training.stage_shapes import StageShapes
from tests.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str], wrong: bool) -> None:
    """Run a forward pass and two steps; `wrong`: the plan has another hidden size than the model."""
    exchange, exchanged = P2PCommunicator._communicate_shapes, 0

    def counted(*args: Any) -> Any:
        nonlocal exchanged
        exchanged += 1
        return exchange(*args)

    def of_another_size(hidden_size: int, *args: Any) -> StageShapes:
        return StageShapes(hidden_size + 1, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PCommunicator, "_communicate_shapes", counted)
        if wrong:
            patch.setattr(passes, "StageShapes", of_another_size)
        trainer = make_trainer(flags)
        engine, counts = trainer.build_engine(), [0]
        engine.infer(fixed_samples(trainer.config.padded_vocab_size, 16, seed=1))
        counts.append(exchanged)
        metrics = []
        for seed in (2, 3):
            samples = fixed_samples(trainer.config.padded_vocab_size, 16, seed, policies_given=True)
            metrics.append(engine.train_step(samples, make_loss()))
            counts.append(exchanged)
    by_pass = [after - before for before, after in itertools.pairwise(counts)]
    write_report(out, {"exchanged": by_pass, "steps": [[step["loss"], step["grad_norm"]] for step in metrics]})
