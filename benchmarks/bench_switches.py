"""Measure the parts of a switch between training and generation: offload, wake-up, weight sync and sleep.

    python -m benchmarks.bench_switches --model DIR [--ranks 1] [--cycles 8] [--json FILE] [--profile] [-- more flags]

Runs the trainer and vLLM without generation. A cycle is a training step followed by a switch: make room, wake vLLM's
weights, send the weights, offload the policy, wake vLLM's cache, put vLLM to sleep, and restore what was offloaded. The
GPU is synchronized before and after every part; `whole` is a switch without synchronization inside. The results are
medians in milliseconds, without the first two cycles.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, task
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples

WARM_UP = 2


class PartTimer:
    """Timer of parts, used as `with parts("sleep"): ...`; it includes the work of the GPU."""

    def __init__(self) -> None:
        self.milliseconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.milliseconds[name].append((time.perf_counter() - start) * 1000)

    def medians(self) -> dict[str, float]:
        return {
            name: round(statistics.median(times[WARM_UP:] or times), 3) for name, times in self.milliseconds.items()
        }


def run_cycles(flags: list[str], cycles: int, profile: bool, out: str) -> None:
    """Run the cycles on this rank; rank 0 writes the results to `out`."""
    import torch
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.training.loss import make_loss

    trainer: Any = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_training([{"messages": [{"role": "user", "content": "hello"}]}], None)
    loop = trainer.loop
    samples = fixed_samples(264, trainer.settings.batch.global_batch_size, policies_given=True)

    def train() -> None:
        loop.stages.residency.for_training()
        loop.stages.training.train_step(samples, make_loss(loop.config.loss))
        loop._weights_version += 1

    parts = PartTimer()
    for _ in range(cycles):
        train()
        switch(loop, parts)
    for _ in range(cycles):
        train()
        with parts("whole"):
            switch(loop, untimed)
    with parts("gc.collect, not part of a switch"):
        gc.collect()
    results: dict[str, Any] = {
        "milliseconds": parts.medians(),
        "tensors": sum(1 for _ in loop.stages.sync.export()),
        "tracked objects": len(gc.get_objects()),
        "GiB": {
            "vLLM to wake": loop.stages.generation.memory_to_wake / 2**30,
            "free": torch.cuda.mem_get_info()[0] / 2**30,
            **{name: group.nbytes() / 2**30 for name, group in loop.stages.residency.groups.items()},
        },
        "offloaded": [name for name, group in loop.stages.residency.groups.items() if group.is_offloaded],
    }
    if profile:
        results["profile"] = profile_lines(lambda: switch(loop, untimed))
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(results, indent=1))
    loop.stages.generation.shutdown()


@contextmanager
def untimed(name: str) -> Iterator[None]:
    yield


def switch(loop: Any, part: Any) -> None:
    """Do what WeightSync, without its checks, and RolloutQueue do around generation."""
    engine, residency, adapter = loop.stages.generation, loop.stages.residency, loop.stages.sync.export.adapter
    with part("make room"):
        residency.make_room(engine.memory_to_wake)
    with part("wake weights"):
        engine.wake_weights()
    with part("prepare the policy for the sync"):
        residency.for_weight_sync()
    if isinstance(part, PartTimer):
        with part("export alone, not part of a switch"):
            weights = list(loop.stages.sync.export())
        with part("load exported weights, not part of a switch"):
            engine.load_weights(iter(weights), loop._weights_version, adapter, collect_checksums=False)
        del weights
    with part("sync: export and load"):
        engine.load_weights(loop.stages.sync.export(), loop._weights_version, adapter, collect_checksums=False)
    with part("offload the policy"):
        residency.for_generation(engine.memory_to_wake)
    with part("wake cache"):
        engine.wake_cache()
    with part("sleep"):
        engine.sleep()
    with part("restore the policy"):
        residency.for_inference()
    with part("restore the rest"):
        residency.restore()


def profile_lines(run: Any) -> list[str]:
    """Return the profile of a call: the functions with the most time, without callees."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes on this machine")
    parser.add_argument("--cycles", type=int, default=8, help="cycles with and without timed parts, each")
    parser.add_argument("--tuner", choices=["full", "lora"], default="full", help="--tuner_type of the run")
    parser.add_argument("--dtype", default="bfloat16", help="--torch_dtype of the run")
    parser.add_argument("--attention-backend", default="flash", help="--attention_backend of the run")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--profile", action="store_true", help="also profile the Python functions of one switch")
    parser.add_argument("extra", nargs="*", help="further flags of `megatron rlhf`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = base_flags(
            model=str(Path(arguments.model).resolve()),
            folder=folder,
            tuner_type=arguments.tuner,
            torch_dtype=arguments.dtype,
            attention_backend=arguments.attention_backend,
            extra=["--sleep_level", "2", "--vllm_max_model_len", "256", *arguments.extra],
        )
        out = Path(folder, "switches.json")
        cycles = task("benchmarks.bench_switches:run_cycles", flags=flags,
                      cycles=arguments.cycles, profile=arguments.profile, out=str(out))  # fmt: skip
        launch(arguments.ranks, [cycles], Path(folder))
        results = json.loads(out.read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for name, milliseconds in results["milliseconds"].items():
        print(f"{name:48}{milliseconds:10.2f} ms")
    print(f"{results['tensors']} tensors, {results['tracked objects']:,} objects that gc.collect scans, GiB: "
          + ", ".join(f"{name} {gib:.2f}" for name, gib in results["GiB"].items()))  # fmt: skip
    print("\n".join(results.get("profile", [])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
