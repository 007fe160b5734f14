"""For one rank with a GPU: several steps with the real engine, without generation, and the memory after each phase."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.tools.check_layouts import fixed_samples
from swift_megatron_grpo.training.loss import make_loss
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights.export import export_weights


def main(out: str, flags: list[str], cycles: int) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer: Any = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_training([{"messages": [{"role": "user", "content": "hello"}]}], None)
    loop, engine = trainer.loop, trainer.loop.stages.generation
    residency = loop.stages.residency
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    seen: list[dict[str, dict[str, int]]] = []
    away: list[list[str]] = []
    for _ in range(cycles):
        levels = {}
        residency.make_room(engine.memory_to_wake)
        engine.wake_weights()
        residency.for_weight_sync()
        engine.load_weights(
            export_weights(trainer.bridge, trainer.unwrapped_models), 0, adapter=None, collect_checksums=False
        )
        residency.for_generation()
        levels["before the cache"] = memory()
        engine.wake_cache()
        levels["awake"] = memory()
        away.append([name for name, group in residency.groups.items() if group.is_offloaded])
        engine.sleep()
        levels["asleep"] = memory()
        residency.for_inference()
        residency.for_training()
        loop.stages.training.train_step(samples, make_loss(loop.config.loss))
        levels["trained"] = memory()
        seen.append(levels)
    told = {"levels": seen, "away": away, "to wake": engine.memory_to_wake}
    Path(f"{out}.json").write_text(json.dumps(told))
    engine.shutdown()


def memory() -> dict[str, int]:
    torch.cuda.synchronize()
    return {"free": torch.cuda.mem_get_info()[0], "allocated": torch.cuda.memory_allocated()}


def recompute_in_small_micro_batches(**job: Any) -> None:
    """A layout of check_layouts.py in which even small micro batches make cheap activations again."""
    from swift_megatron_grpo.tools.check_layouts import run_layout
    from swift_megatron_grpo.training import fast_kernels as kernels
    from swift_megatron_grpo.training.memory import recompute_elementwise

    drop_and_recompute, limit, calls = kernels.drop_and_recompute, kernels.MIN_TOKENS_TO_RECOMPUTE, []

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        recompute_elementwise.drop_and_recompute(*args, **kwargs)

    kernels.MIN_TOKENS_TO_RECOMPUTE, kernels.drop_and_recompute = 1, counted
    try:
        run_layout(**job)
    finally:
        kernels.MIN_TOKENS_TO_RECOMPUTE, kernels.drop_and_recompute = limit, drop_and_recompute
    Path(job["folder"], f"{job['name']}.calls.json").write_text(json.dumps(len(calls)))


def round_trips(out: str, flags: list[str]) -> None:
    """How fast everything leaves and returns, and how much memory that moves."""
    from tests.dist.offloading import EVERYTHING, Run

    run = Run(flags, EVERYTHING)
    run.step(0)  # Adam's states
    everything_leaves(run.residency)  # and with it, for good, what backward has left behind
    everything_returns(run.residency)
    size = sum(group.nbytes() for group in run.residency.groups.values())
    trips = []
    for _ in range(2):
        before = fingerprints(run)
        torch.cuda.empty_cache()
        levels, seconds, kept = [memory()], [], []
        for move in (everything_leaves, everything_returns):
            start = time.perf_counter()
            move(run.residency)
            levels.append(memory())  # it waits for the GPU
            seconds.append(time.perf_counter() - start)
            kept.append(segments())
        trips.append({"levels": levels, "seconds": seconds, "kept": kept[0], "equal": fingerprints(run) == before})
    Path(f"{out}.json").write_text(json.dumps({"bytes": size, "trips": trips}))


def segments() -> list[tuple[int, int]]:
    """Of torch's allocator, the large ones: how large, and how much of each is in use."""
    held = ((each["total_size"], each["allocated_size"]) for each in torch.cuda.memory_snapshot())
    return [(total, used) for total, used in held if total > 2**25]


def fingerprints(run: Any) -> dict[str, list[int]]:
    """Of all that comes back; copies on the GPU would lie between what is to leave."""
    return {name: [fingerprint(t) for t in those] for name, those in run.tensors().items() if name != "gradients"}


def fingerprint(tensor: torch.Tensor) -> int:
    """Changes with any bit and with any two values that change places."""
    total = 0
    for number, part in enumerate(tensor.detach().reshape(-1).view(torch.int16).split(2**24)):
        places = torch.arange(part.numel(), device=part.device) % 32749 + 1
        total += (number + 1) * int((part.long() * places).sum())
    return total


def everything_leaves(residency: Residency) -> None:
    residency.make_room(sum(group.nbytes() for group in residency.groups.values()))  # nothing is free, says Run
    residency.for_generation()


def everything_returns(residency: Residency) -> None:
    residency.for_reference()
    residency.restore()
