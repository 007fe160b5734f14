"""Where the time between training and generation goes: sleep, wake, what moves, the weight sync and its parts.

    python -m benchmarks.bench_switches --model DIR [--ranks 1] [--cycles 8] [--json FILE] [--profile] [-- more flags]

The real trainer and the real engine, without generation in between: step, make room, wake up, send the weights, let the
policy leave, wake the cache, sleep, bring back. Every part is bounded by synchronisations of the GPU; `whole` is a
switch without them. Medians over the cycles after the first two, in milliseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_megatron_grpo.tools.check_layouts import base_flags, fixed_samples

WARM_UP = 2


class PartTimer:
    """`with parts("sleep"): ...` in milliseconds, the GPU's work included."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seen[name].append((time.perf_counter() - start) * 1000)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(seen[WARM_UP:] or seen), 3) for name, seen in self.seen.items()}


def be_a_rank(flags: list[str], cycles: int, profile: bool, out: str) -> None:
    import torch

    from swift_megatron_grpo.plugin.activation import hook_platform
    from swift_megatron_grpo.plugin.register import register
    from swift_megatron_grpo.training.loss import make_loss

    hook_platform()
    register()
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

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
            switch(loop, lambda name: no_part())
    with parts("gc.collect, not part of a switch"):
        gc.collect()
    seen: dict[str, Any] = {
        "milliseconds": parts.medians(),
        "tensors": sum(1 for _ in loop.stages.sync.export()),
        "tracked objects": len(gc.get_objects()),
        "GiB": {
            "vLLM to wake": loop.stages.generation.memory_to_wake / 2**30,
            "free": torch.cuda.mem_get_info()[0] / 2**30,
            **{name: group.nbytes() / 2**30 for name, group in loop.stages.residency.groups.items()},
        },
        "away": [name for name, group in loop.stages.residency.groups.items() if group.is_offloaded],
    }
    if profile:
        seen["profile"] = profiled(lambda: switch(loop, lambda name: no_part()))
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(seen, indent=1))
    loop.stages.generation.shutdown()


@contextmanager
def no_part() -> Iterator[None]:
    yield


def switch(loop: Any, part: Any) -> None:
    """What WeightSync, without its checks, and Rollouts do around generation."""
    engine, residency, adapter = loop.stages.generation, loop.stages.residency, loop.stages.sync.export.adapter
    with part("make room"):
        residency.make_room(engine.memory_to_wake)
    with part("wake weights"):
        engine.wake_weights()
    with part("policy for the sync"):
        residency.for_weight_sync()
    if isinstance(part, PartTimer):
        with part("export alone, not part of a switch"):
            weights = list(loop.stages.sync.export())
        with part("load what was exported, not part of a switch"):
            engine.load_weights(iter(weights), loop._weights_version, adapter, collect_checksums=False)
        del weights
    with part("sync: export and load"):
        engine.load_weights(loop.stages.sync.export(), loop._weights_version, adapter, collect_checksums=False)
    with part("policy leaves"):
        residency.for_generation()
    with part("wake cache"):
        engine.wake_cache()
    with part("sleep"):
        engine.sleep()
    with part("policy returns"):
        residency.for_inference()
    with part("rest returns"):
        residency.restore()


def profiled(run: Any) -> list[str]:
    """The functions that take longest by themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue().splitlines()


def launch(ranks: int, job: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port",
               str(random.randint(20000, 32000)), __file__, "--job", str(file)]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", **os.environ}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{ranks} ranks ended with code {done.returncode}:\n{done.stdout[-6000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--tuner", choices=["full", "lora"], default="full")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention-backend", default="flash")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="also the Python functions of one switch")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="more flags of `megatron rlhf`, after --")
    arguments = parser.parse_args()
    if arguments.job:
        be_a_rank(**json.loads(arguments.job.read_text()))
        return 0
    if not arguments.model:
        parser.error("--model is required")
    arguments.model = str(Path(arguments.model).resolve())
    arguments.extra = ["--sleep_level", "2", "--vllm_max_model_len", "256", *arguments.extra]
    with tempfile.TemporaryDirectory() as folder:
        job = {"flags": base_flags(arguments, folder), "cycles": arguments.cycles, "profile": arguments.profile,
               "out": str(Path(folder, "switches.json"))}  # fmt: skip
        launch(arguments.ranks, job, Path(folder, "job.json"))
        seen = json.loads(Path(folder, "switches.json").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n")
    for name, milliseconds in seen["milliseconds"].items():
        print(f"{name:48}{milliseconds:10.2f} ms")
    print(f"{seen['tensors']} tensors, {seen['tracked objects']:,} objects that gc.collect walks, GiB: "
          + ", ".join(f"{name} {gib:.2f}" for name, gib in seen["GiB"].items()))  # fmt: skip
    print("\n".join(seen.get("profile", [])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
