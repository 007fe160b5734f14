"""Find the nearest settings that fit into a GPU's memory. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_megatron_grpo.cli.estimate.activations import Decoder, Recompute, VisionTower
from swift_megatron_grpo.cli.estimate.audio_part import AudioPart
from swift_megatron_grpo.cli.estimate.memory import PHASES, Engine, RankMemory, Training, plan_memory, with_budget
from swift_megatron_grpo.cli.estimate.parameters import Tensor
from swift_megatron_grpo.settings.layout import Layout

MARGIN = 0.04  # of the GPU, for fragmentation and for what the estimate misses
_SMALLEST_BUDGET = 1024  # tokens
_GPUS_OF_MACHINE = 8  # the most that divide layers, or vLLM
_MOST_GPUS = 4096
_MOST_UTILIZATION = 0.9
_WITH_VLLM = ("weight sync", "generation")


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as memory is concerned."""

    tensors: Sequence[Tensor]
    decoder: Decoder
    training: Training
    engine: Engine | None  # None: servers generate
    longest_sample: int  # tokens; a micro batch has at least one
    vision_tower: VisionTower | None = None  # of a model that takes images
    audio_part: AudioPart | None = None  # of a model that takes recordings

    def memory(self, gpu_bytes: float) -> list[RankMemory]:
        towers = self.vision_tower, self.audio_part
        return plan_memory(self.tensors, self.decoder, self.training, self.engine, gpu_bytes, *towers)

    def fits(self, gpu_bytes: float, *phases: str) -> bool:
        peaks = [rank.phases for rank in self.memory(gpu_bytes)]
        return all(peak[phase] <= gpu_bytes * (1 - MARGIN) for peak in peaks for phase in phases)

    def engine_fits(self, gpu_bytes: float) -> bool:
        """Return whether vLLM's share has room for its weights and the longest sequence."""
        return self.engine is None or self.engine.fits(gpu_bytes)

    def with_training(self, **changes: Any) -> Run:
        return replace(self, training=replace(self.training, **changes))


@dataclass(frozen=True, slots=True)
class Change:
    """Flags that make a run fit, and what they cost."""

    flags: str
    cost: str
    run: Run


def settings_that_fit(run: Run, gpu_bytes: float, allows: Callable[[Layout], bool]) -> list[Change]:
    """Return changes after which every phase fits, the cheapest first. `allows`: if a layout can divide the model."""
    base = Change("", "", run)
    if run.engine is not None and not run.fits(gpu_bytes, *_WITH_VLLM):
        smaller = (
            change
            for change in [*_smaller_shares(run, run.engine), *_offloaded(run)]
            if change.run.fits(gpu_bytes, *_WITH_VLLM) and change.run.engine_fits(gpu_bytes)
        )
        base = next(smaller, next(_offloaded(run), base))

    def fits(change: Change) -> bool:
        return allows(change.run.training.layout) and change.run.fits(gpu_bytes, *PHASES)

    found = [_joined(base, change) for kind in _kinds(base.run) if (change := next(filter(fits, kind), None))]
    return [change for change in found if change.flags]


def _joined(first: Change, second: Change) -> Change:
    parts = [(one.flags, one.cost) for one in (first, second) if one.flags]
    return Change(" ".join(flags for flags, _ in parts), "; ".join(cost for _, cost in parts), second.run)


def _smaller_shares(run: Run, engine: Engine) -> Iterator[Change]:
    for percent in range(int(engine.utilization * 100) // 10 * 10, 10, -10):
        smaller = replace(engine, utilization=percent / 100)
        if smaller.utilization < engine.utilization:
            flag = f"--vllm_gpu_memory_utilization {smaller.utilization:g}"
            yield Change(flag, "a smaller cache", replace(run, engine=smaller))


def _offloaded(run: Run) -> Iterator[Change]:
    offloading = run.with_training(offload_model=True, offload_optimizer=True, offload_grad=True)
    flags = "--offload_model true --offload_optimizer true --offload_grad true"
    if run.engine is not None and run.engine.sleep_level == 0:
        offloading, flags = replace(offloading, engine=replace(run.engine, sleep_level=2)), f"{flags} --sleep_level 2"
    if offloading != run:
        yield Change(flags, "copies to the host in every rollout", offloading)


def _kinds(run: Run) -> Iterator[Iterable[Change]]:
    """Yield the changes of each kind, from the smallest cost on."""
    training, engine, layout = run.training, run.engine, run.training.layout
    yield [Change("", "", run)]
    if engine is not None and engine.sleep_level == 0:
        asleep = replace(run, engine=replace(engine, sleep_level=2))
        yield [Change("--sleep_level 2", "vLLM sleeps and wakes in every rollout", asleep)]
    yield _smaller_budgets(run)
    if training.recompute == Recompute():
        recomputing = run.with_training(recompute=Recompute(elementwise=True))
        yield [Change("--recompute_elementwise true", "about 1 % of a step", recomputing)]
    if training.recompute.granularity != "full":
        flags = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
        recomputing = run.with_training(recompute=Recompute("full", "uniform", 1))
        yield _and_smaller_budgets(Change(flags, "a third more FLOPs", recomputing))
    yield _larger_tensor_parallel(run)
    if engine is not None:  # vLLM's weights leave room for the trainer's while they are sent
        cost = "all-reduces in every layer of generation"
        yield [
            Change(f"--vllm_tensor_parallel_size {size}", cost, replace(run, engine=replace(engine, ranks=size)))
            for size in _doubled(engine.ranks, _GPUS_OF_MACHINE)
            if layout.world_size % size == 0
        ]
    if training.shards_optimizer and training.lora_rank is None:  # data-parallel ranks share the optimizer's states
        yield [
            Change(f"{ranks} GPUs", "GPUs", run.with_training(layout=replace(layout, world_size=ranks)))
            for ranks in _doubled(layout.world_size, _MOST_GPUS)
        ]
    if training.lora_rank is None:
        if training.optimizer_on_cpu == 0:
            cost = "a slower optimizer step, and memory of the host"
            yield [Change("--optimizer_cpu_offload true", cost, run.with_training(optimizer_on_cpu=1.0))]
        flags = "--tuner_type lora --lora_rank 16 --target_modules all-linear"
        adapted = run.with_training(lora_rank=16, frozen_reference=False)
        yield _and_smaller_budgets(Change(flags, "adapters are trained instead of all weights", adapted))


def _smaller_budgets(run: Run) -> Iterator[Change]:
    smallest = max(_SMALLEST_BUDGET, run.longest_sample)
    budget = run.training.tokens.packed
    while budget > smallest:
        budget = max(budget // 2, smallest)
        change = replace(run, training=with_budget(run.training, budget))
        yield Change(f"--max_tokens_per_micro_batch {budget}", "smaller matrix products", change)


def _and_smaller_budgets(change: Change) -> Iterator[Change]:
    yield change
    for budget in _smaller_budgets(change.run):
        yield _joined(change, budget)


def _larger_tensor_parallel(run: Run) -> Iterator[Change]:
    layout = run.training.layout
    for size in _doubled(layout.tensor_model_parallel_size, _GPUS_OF_MACHINE):
        ranks = max(layout.world_size, size * layout.pipeline_model_parallel_size * layout.context_parallel_size)
        divided = replace(layout, tensor_model_parallel_size=size, sequence_parallel=True, world_size=ranks)
        flags = f"--tensor_model_parallel_size {size} --sequence_parallel true"
        flags += "" if ranks == layout.world_size else f" on {ranks} GPUs"
        yield Change(flags, "all-gathers in every layer", run.with_training(layout=divided))


def _doubled(size: int, most: int) -> Iterator[int]:
    while (size := 2 * size) <= most:
        yield size


def engines_that_fit(engine: Engine, gpu_bytes: float, ranks: int) -> Iterator[tuple[str, Engine]]:
    """Yield flags with which the longest sequence fits, the nearest first: a larger share, then more ranks."""
    for percent in range(math.ceil(engine.utilization * 10) * 10, round(_MOST_UTILIZATION * 100) + 1, 10):
        larger = replace(engine, utilization=percent / 100)
        if percent / 100 > engine.utilization and larger.fits(gpu_bytes):
            yield f"--vllm_gpu_memory_utilization {percent / 100:g}", larger
            break
    for size in _doubled(engine.ranks, min(_GPUS_OF_MACHINE, ranks)):
        divided = replace(engine, ranks=size)
        if ranks % size == 0 and divided.fits(gpu_bytes):
            yield f"--vllm_tensor_parallel_size {size}", divided
            break
