"""External plugin of ms-swift that measures its Megatron GRPO trainer, or this package's, and changes no numbers.

Both trainers receive the same: completions of given lengths, a hash of the text as reward, a memory cap, and no
checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate
from torch.distributed import get_rank
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.instrument.process import cap_memory, wait_for_turn, write_results
from benchmarks.harness.instrument.random_weights import draw_weights
from benchmarks.harness.job import Job
from benchmarks.harness.workload import places, reward_of, row_of

JOB = Job.read()
CLOCK = Clock()
TOKENS: list[tuple[int, int]] = []  # (all, in the completion) of each sequence that the first step trained


class HashReward(ORM):
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [reward_of(text) for text in completions]


class CannedCompletions:
    """Random tokens with the job's lengths, determined by step, row and place in the group."""

    def __init__(self) -> None:
        self._steps = 0

    def for_rows(self, rows: Iterable[int]) -> list[tuple[list[int], str]]:
        """Return tokens and text of one completion for each entry; completions of a group are consecutive."""
        self._steps += 1
        return [self._one(row, place) for row, place in places(rows)]

    def _one(self, row: int, place: int) -> tuple[list[int], str]:
        name = f"{JOB.seed}/{self._steps}/{row}/{place}"
        rng = random.Random(name)
        return rng.choices(range(JOB.vocabulary), k=JOB.completion_tokens[row][place]), name


def force_lengths(engine: Any, owner: Any, method: str, content_of: Callable[[Any], str]) -> None:
    """Make vLLM end each completion exactly at the job's length; random weights would not end it.

    `owner.method` generates in this trainer. Its first argument is a list of requests, which the engine receives in the
    same order.
    """
    generate, prepare_sampling = getattr(owner, method), engine._prepare_generation_config
    pending: list[int] = []

    def generate_lengths(self: Any, *args: Any, **kwargs: Any) -> Any:
        requests = [*args, *kwargs.values()][0]
        rows = [row_of(content_of(request)) for request in requests]
        pending[:] = [JOB.completion_tokens[row][place] for row, place in places(rows)]
        with CLOCK.phase("generation"):
            return generate(self, *args, **kwargs)

    def prepare_fixed_length(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampling = prepare_sampling(self, *args, **kwargs)
        sampling.max_tokens, sampling.ignore_eos = pending.pop(0), True
        if JOB.media_tokens:  # ms-swift cannot train a completion that holds one
            sampling.logit_bias = dict.fromkeys(JOB.media_tokens, -100.0)
        return sampling

    setattr(owner, method, generate_lengths)
    engine._prepare_generation_config = prepare_fixed_length
    engine._add_stop_words = do_nothing


def measure_steps(trainer_class: type[BaseMegatronTrainer]) -> None:
    train_step = trainer_class.train_step

    def measured(self: Any, data_iterator: Any) -> Any:
        if len(CLOCK.steps) == JOB.profiled_step:
            return profiled(Path(JOB.folder, f"kernels.{get_rank()}.txt"), lambda: train_step(self, data_iterator))
        if not CLOCK.steps:
            config = self.unwrapped_models[0].config
            CLOCK.time_method(self.optimizer, "step", "optimizer")
            CLOCK.time_method(config, "finalize_model_grads_func", "grad_sync")
        with CLOCK.step() as record:
            metrics, grad_norm, updated = train_step(self, data_iterator)
        losses = [float(micro["loss"]) for micro in metrics]  # of micro batches; empty before the last pipeline stage
        record["loss"] = sum(losses) / len(losses) if losses else None
        record["grad_norm"] = float(grad_norm)
        write_results(JOB, CLOCK, TOKENS, get_rank())
        return metrics, grad_norm, updated

    trainer_class.train_step = measured


def profiled(file: Path, run: Callable[[], Any]) -> Any:
    """Return what `run` returns, and write the kernels that it runs, the longest first."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        result = run()
    table = profiler.key_averages().table(
        sort_by=f"self_{activity.name.lower()}_time_total", row_limit=80, max_name_column_width=120
    )
    file.write_text(table)
    return result


def do_nothing(*_: Any) -> None: ...


def install() -> None:
    # These imports take seconds, during which another process may measure.
    arm = import_module(f"benchmarks.harness.instrument.{JOB.arm}")
    if generates := not JOB.canned and not JOB.served:
        from swift.infer_engine import GRPOVllmEngine
    wait_for_turn(JOB)
    cap_memory(JOB)
    if JOB.media_tokens:
        Qwen2VLTemplate.image_token_id = JOB.media_tokens[0]  # ms-swift's source has the number of released models
    if JOB.random_weights:
        draw_weights()
    orms["hash"] = HashReward
    BaseMegatronTrainer.save_checkpoint = do_nothing
    measure_steps(arm.install(CLOCK, JOB, TOKENS, CannedCompletions()))
    if generates:  # a server ends all completions at the same length, the longest
        force_lengths(GRPOVllmEngine, *arm.generation_method())


install()
