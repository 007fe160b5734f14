"""An external plugin of ms-swift that measures its Megatron GRPO trainer, or this package's, and changes no numbers.

Both arms get the same: completions of given lengths, a reward that is a hash of the text, a memory cap, no checkpoints.
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.rewards import ORM, orms

from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.job import Job
from benchmarks.harness.workload import row_of

JOB = Job.read()
CLOCK = Clock()
TOKENS: list[tuple[int, int]] = []  # (all, of the completion) of each sequence that the first step really trained


class HashReward(ORM):
    """Differs from completion to completion, the same in both arms and again in the next run."""

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [zlib.crc32(text.encode()) / 2**32 for text in completions]


class CannedCompletions:
    """Random tokens of the job's lengths; the same for the same step, row and place in its group."""

    def __init__(self) -> None:
        self._steps = 0

    def of(self, rows: Iterable[int]) -> list[tuple[list[int], str]]:
        """Tokens and text of one completion for each entry; the group's completions follow each other."""
        self._steps += 1
        return [self._one(row, place) for row, place in places(rows)]

    def _one(self, row: int, place: int) -> tuple[list[int], str]:
        name = f"{JOB.seed}/{self._steps}/{row}/{place}"
        rng = random.Random(name)
        return rng.choices(range(JOB.vocabulary), k=JOB.completion_tokens[row][place]), name


def places(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Every rank generates whole groups, so a completion's place is how often its row came before."""
    seen: Counter[int] = Counter()
    for row in rows:
        yield row, seen[row]
        seen[row] += 1


def force_lengths(engine: Any, owner: Any, method: str, content_of: Callable[[Any], str]) -> None:
    """vLLM stops each completion at the job's length and not before: random weights never stop by themselves.

    `owner.method` is what an arm calls, first of all with a list of requests; they reach the engine in that order.
    """
    generate, sampling_of = getattr(owner, method), engine._prepare_generation_config
    pending: list[int] = []

    def generate_lengths(self: Any, *args: Any, **kwargs: Any) -> Any:
        requests = [*args, *kwargs.values()][0]
        rows = [row_of(content_of(request)) for request in requests]
        pending.extend(JOB.completion_tokens[row][place] for row, place in places(rows))
        with CLOCK.phase("generation"):
            return generate(self, *args, **kwargs)

    def forced(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampling = sampling_of(self, *args, **kwargs)
        sampling.max_tokens, sampling.ignore_eos = pending.pop(0), True
        return sampling

    setattr(owner, method, generate_lengths)
    engine._prepare_generation_config = forced
    engine._add_stop_words = do_nothing


def measure_steps(trainer_class: type[BaseMegatronTrainer]) -> None:
    train_step = trainer_class.train_step

    def measured(self: Any, data_iterator: Any) -> Any:
        if not CLOCK.steps:
            config = self.unwrapped_models[0].config
            CLOCK.time_method(self.optimizer, "step", "optimizer")
            CLOCK.time_method(config, "finalize_model_grads_func", "grad_sync")
        with CLOCK.step() as record:
            metrics, grad_norm, updated = train_step(self, data_iterator)
        losses = [float(each["loss"]) for each in metrics]  # of micro batches; none before the last pipeline stage
        record["loss"] = sum(losses) / len(losses) if losses else None
        record["grad_norm"] = float(grad_norm)
        write_results()
        return metrics, grad_norm, updated

    trainer_class.train_step = measured


def write_results() -> None:
    results = {
        "steps": CLOCK.steps,
        "tokens": sum(all_tokens for all_tokens, _ in TOKENS),
        "completion_tokens": sum(completion for _, completion in TOKENS),
    }
    Path(JOB.folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


def do_nothing(*_: Any) -> None: ...


def install() -> None:
    if JOB.waits:
        while not Path(JOB.folder, "go").exists():
            time.sleep(0.05)
    if JOB.memory_cap_gb is not None:
        device = int(os.environ["LOCAL_RANK"])
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(JOB.memory_cap_gb * 1e9 / total, device)
    orms["hash"] = HashReward
    BaseMegatronTrainer.save_checkpoint = do_nothing
    arm = import_module(f"benchmarks.harness.instrument.{JOB.arm}")
    measure_steps(arm.install(CLOCK, JOB, TOKENS, CannedCompletions()))
    if not JOB.canned:
        from swift.infer_engine import GRPOVllmEngine

        force_lengths(GRPOVllmEngine, *arm.what_generates())


install()
