"""Tasks for one rank with a GPU: steps with the real engine but without generation, and memory after each phase."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.training.loss import make_loss
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights.export.export import export_weights


def main(out: str, flags: list[str], cycles: int) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer: Any = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_training([{"messages": [{"role": "user", "content": "hello"}]}], None)
    loop, engine = trainer.loop, trainer.loop.stages.generation
    residency = loop.stages.residency
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    levels_of_cycles: list[dict[str, dict[str, int]]] = []
    offloaded: list[list[str]] = []
    to_wake: list[int] = []  # by the engine's account, in the second decision of each cycle
    for _ in range(cycles):
        levels = {}
        residency.make_room(engine.memory_to_wake)
        engine.wake_weights()
        residency.for_weight_sync()
        engine.load_weights(
            export_weights(trainer.bridge, trainer.unwrapped_models), 0, adapter=None, collect_checksums=False
        )
        to_wake.append(engine.memory_to_wake)
        residency.for_generation(to_wake[-1])
        levels["before the cache"] = memory()
        engine.wake_cache()
        levels["awake"] = memory()
        offloaded.append([name for name, group in residency.groups.items() if group.is_offloaded])
        engine.sleep()
        levels["asleep"] = memory()
        residency.for_inference()
        residency.for_training()
        loop.stages.training.train_step(samples, make_loss(loop.config.loss))
        levels["trained"] = memory()
        levels_of_cycles.append(levels)
    results = {"levels": levels_of_cycles, "offloaded": offloaded, "to wake": to_wake}
    Path(f"{out}.json").write_text(json.dumps(results))
    engine.shutdown()


def memory() -> dict[str, int]:
    torch.cuda.synchronize()
    return {"free": torch.cuda.mem_get_info()[0], "allocated": torch.cuda.memory_allocated()}


def recompute_in_small_micro_batches(**job: Any) -> None:
    """Run a layout of cli/check_layouts in which even small micro batches recompute elementwise activations."""
    from swift_megatron_grpo.cli.check_layouts.ranks import run_layout
    from swift_megatron_grpo.training.layers import fast_kernels as kernels

    drop_and_recompute, limit, calls = kernels.drop_and_recompute, kernels.MIN_TOKENS_TO_RECOMPUTE, []

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        drop_and_recompute(*args, **kwargs)

    kernels.MIN_TOKENS_TO_RECOMPUTE, kernels.drop_and_recompute = 1, counted
    try:
        run_layout(**job)
    finally:
        kernels.MIN_TOKENS_TO_RECOMPUTE, kernels.drop_and_recompute = limit, drop_and_recompute
    Path(job["folder"], f"{job['name']}.calls.json").write_text(json.dumps(len(calls)))


def round_trips(out: str, flags: list[str]) -> None:
    """Measure time and memory of offloading everything and restoring it."""
    from tests.programs.dist.offloading import EVERYTHING, Run

    run = Run(flags, EVERYTHING)
    run.step(0)  # creates Adam's states
    offload_everything(run.residency)  # also frees leftovers of backward, which do not return
    restore_everything(run.residency)
    size = sum(group.nbytes() for group in run.residency.groups.values())
    trips = []
    for _ in range(2):
        before = fingerprints(run)
        torch.cuda.empty_cache()
        levels, seconds, kept = [memory()], [], []
        for move in (offload_everything, restore_everything):
            start = time.perf_counter()
            move(run.residency)
            levels.append(memory())  # synchronizes the GPU
            seconds.append(time.perf_counter() - start)
            kept.append(segments())
        trips.append({"levels": levels, "seconds": seconds, "kept": kept[0], "equal": fingerprints(run) == before})
    Path(f"{out}.json").write_text(json.dumps({"bytes": size, "trips": trips}))


def segments() -> list[tuple[int, int]]:
    """Return (size, bytes in use) of the large segments of torch's allocator."""
    sizes = ((segment["total_size"], segment["allocated_size"]) for segment in torch.cuda.memory_snapshot())
    return [(total, used) for total, used in sizes if total > 2**25]


def fingerprints(run: Any) -> dict[str, list[int]]:
    """Return fingerprints of all tensors that are restored.

    Copies to compare with would occupy GPU memory between the tensors that are offloaded.
    """
    return {name: [fingerprint(t) for t in tensors] for name, tensors in run.tensors().items() if name != "gradients"}


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes if any bit changes or any two values are swapped."""
    total = 0
    for number, part in enumerate(tensor.detach().reshape(-1).view(torch.int16).split(2**24)):
        places = torch.arange(part.numel(), device=part.device) % 32749 + 1
        total += (number + 1) * int((part.long() * places).sum())
    return total


def offload_everything(residency: Residency) -> None:
    residency.make_room(sum(group.nbytes() for group in residency.groups.values()))  # Run reports no free memory
    residency.for_generation(0)


def restore_everything(residency: Residency) -> None:
    residency.for_reference()
    residency.restore()
