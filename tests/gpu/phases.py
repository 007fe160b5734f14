"""For one rank with a GPU: several steps with the real engine, without generation, and the memory after each phase."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from scripts.check_layouts import fixed_samples
from swift_megatron_grpo.training.residency import Residency


def main(out: str, flags: list[str], cycles: int) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer: Any = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_training([{"messages": [{"role": "user", "content": "hello"}]}], None)
    loop, engine = trainer.loop, trainer.loop.parts.generation
    residency = loop.parts.residency
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    seen: list[dict[str, dict[str, int]]] = []
    away: list[list[str]] = []
    for _ in range(cycles):
        levels = {}
        residency.make_room(engine.memory_to_wake)
        engine.wake_weights()
        residency.for_weight_sync()
        engine.load_weights(loop.parts.export_weights(), 0, loop.parts.adapter)
        residency.for_generation()
        levels["before the cache"] = memory()
        engine.wake_cache()
        levels["awake"] = memory()
        away.append([name for name, group in residency.groups.items() if group.is_away])
        engine.sleep()
        levels["asleep"] = memory()
        residency.for_inference()
        residency.for_training()
        loop.parts.training.train_step(samples, loop._loss)
        levels["trained"] = memory()
        seen.append(levels)
    told = {"levels": seen, "away": away, "to wake": engine.memory_to_wake}
    Path(f"{out}.json").write_text(json.dumps(told))
    engine.shutdown()


def memory() -> dict[str, int]:
    torch.cuda.synchronize()
    return {"free": torch.cuda.mem_get_info()[0], "allocated": torch.cuda.memory_allocated()}


def round_trips(out: str, flags: list[str]) -> None:
    """How fast everything leaves and returns, and how much memory that moves."""
    from tests.dist.offloading import EVERYTHING, Run

    run = Run(flags, EVERYTHING)
    run.step(0)  # Adam's states
    everything_returns(run.residency)
    size = sum(group.nbytes() for group in run.residency.groups.values())
    trips = []
    for _ in range(4):
        before = {name: [t.clone() for t in those] for name, those in run.tensors().items() if name != "gradients"}
        torch.cuda.empty_cache()
        levels, seconds = [memory()], []
        for move in (everything_leaves, everything_returns):
            start = time.perf_counter()
            move(run.residency)
            levels.append(memory())  # it waits for the GPU
            seconds.append(time.perf_counter() - start)
        after = run.tensors()
        equal = all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
        trips.append({"levels": levels, "seconds": seconds, "equal": equal})
    Path(f"{out}.json").write_text(json.dumps({"bytes": size, "trips": trips}))


def everything_leaves(residency: Residency) -> None:
    residency.make_room(sum(group.nbytes() for group in residency.groups.values()))  # nothing is free, says Run
    residency.for_generation()


def everything_returns(residency: Residency) -> None:
    residency.for_reference()
    residency.restore()
