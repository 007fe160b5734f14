"""Passes of a pipeline, with the number of shapes that its stages exchange and of waits for the GPU in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.training import passes, stage_shapes
from swift_megatron_grpo.training.stage_shapes import StageShapes
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str], train: list[bool], wrong: bool) -> None:
    """Run passes forward or, with `train`, also backward.

    `wrong`: the plan of the last rank alone has another hidden size than the model.
    """
    calls, warnings = Counter[str](), list[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        exchange, wait = P2PCommunicator._communicate_shapes, torch.cuda.synchronize
        patch.setattr(P2PCommunicator, "_communicate_shapes", counted("exchanged", exchange))
        patch.setattr(torch.cuda, "synchronize", counted("waits", wait))
        patch.setattr(stage_shapes.logger, "warning", warnings.append)
        if wrong:
            patch.setattr(passes, "StageShapes", wrong_on_the_last_rank)
        trainer = make_trainer(flags)
        engine, by_pass, steps = trainer.build_engine(), list[Counter[str]](), []
        for seed, backward in enumerate(train, start=1):
            samples = fixed_samples(trainer.config.padded_vocab_size, 16, seed, policies_given=backward)
            calls.clear()
            if backward:
                step = engine.train_step(samples, make_loss())
                steps.append([step["loss"], step["grad_norm"]])
            else:
                engine.infer(samples)
            by_pass.append(calls.copy())
    report = {name: [counts[name] for counts in by_pass] for name in ("exchanged", "waits")}
    pipeline = torch.distributed.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    sync = engine.passes.config.batch_p2p_sync
    write_report(out, {**report, "steps": steps, "warnings": warnings, "pipeline": pipeline, "batch_p2p_sync": sync})


def wrong_on_the_last_rank(hidden_size: int, *args: Any) -> StageShapes:
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return StageShapes(hidden_size + is_last, *args)
