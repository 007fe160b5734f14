"""Find the nearest settings that fit into a GPU's memory. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from swift_megatron_grpo.cli.estimate.activations import Decoder, Recompute
from swift_megatron_grpo.cli.estimate.memory import PHASES, Training, Vllm, plan_memory, with_budget
from swift_megatron_grpo.cli.estimate.parameters import Tensor
from swift_megatron_grpo.cli.estimate.vision_tower import VisionTower
from swift_megatron_grpo.settings.layout import Layout

MARGIN = 0.04  # of the GPU, for fragmentation and for what the estimate misses
_SMALLEST_BUDGET = 1024  # tokens
_LARGEST_TENSOR_PARALLEL = 8  # GPUs of one machine
_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as memory is concerned."""

    tensors: Sequence[Tensor]
    decoder: Decoder
    training: Training
    vllm: Vllm | None
    longest_sample: int  # tokens; a micro batch has at least one
    vision_tower: VisionTower | None = None  # of a model that takes images

    def peak(self, phase: str, gpu_bytes: float) -> float:
        ranks = plan_memory(self.tensors, self.decoder, self.training, self.vllm, gpu_bytes, self.vision_tower)
        return max(rank.phases[phase] for rank in ranks)

    def fits(self, phase: str, gpu_bytes: float) -> bool:
        return self.peak(phase, gpu_bytes) <= gpu_bytes * (1 - MARGIN)

    def engine_fits(self, gpu_bytes: float) -> bool:
        """Return whether vLLM's share has room for its weights and the longest sequence."""
        return self.vllm is None or self.vllm.engine.fits(gpu_bytes)


@dataclass(frozen=True, slots=True)
class Change:
    """Flags that make a run fit, and what they cost."""

    flags: str
    cost: str
    run: Run


def settings_that_fit(run: Run, gpu_bytes: float, allows: Callable[[Layout], bool]) -> list[Change]:
    """Return changes of a few flags after which every phase fits, the cheapest first; empty if no change is enough.

    `allows`: whether the model can be divided by a layout.
    """
    if run.vllm is None or _fits_vllm(run, gpu_bytes):
        base = Change("", "", run)
    else:
        smaller = (
            change
            for change in _less_generation(run)
            if _fits_vllm(change.run, gpu_bytes) and change.run.engine_fits(gpu_bytes)
        )
        base = next(smaller, next(_offloaded(run), Change("", "", run)))
    kinds = (_nothing, _awake_no_more, _smaller_budgets, _recomputed_elementwise, _recomputed, _larger_tensor_parallel,
             _divided_engine, _more_gpus, _optimizer_on_cpu, _adapters)  # fmt: skip
    found = []
    for kind in kinds:
        for change in kind(base.run):
            layout = change.run.training.layout
            if allows(layout) and all(change.run.fits(phase, gpu_bytes) for phase in PHASES):
                found.append(_joined(base, change))
                break
    return [change for change in found if change.flags]


def _fits_vllm(run: Run, gpu_bytes: float) -> bool:
    return run.fits("weight sync", gpu_bytes) and run.fits("generation", gpu_bytes)


def _joined(first: Change, second: Change) -> Change:
    parts = [(one.flags, one.cost) for one in (first, second) if one.flags]
    return Change(" ".join(flags for flags, _ in parts), "; ".join(cost for _, cost in parts), second.run)


# ---- kinds of changes, each from the smallest cost on


def _nothing(run: Run) -> Iterator[Change]:
    yield Change("", "", run)


def _awake_no_more(run: Run) -> Iterator[Change]:
    if run.vllm is not None and run.vllm.sleep_level == 0:
        vllm = replace(run.vllm, sleep_level=2)
        yield Change("--sleep_level 2", "vLLM sleeps and wakes in every rollout", replace(run, vllm=vllm))


def _less_generation(run: Run) -> Iterator[Change]:
    """Free memory while vLLM generates."""
    assert run.vllm is not None
    engine = run.vllm.engine
    for percent in range(int(engine.utilization * 100) // 10 * 10, 10, -10):
        share = percent / 100
        if share < engine.utilization:
            vllm = replace(run.vllm, engine=replace(engine, utilization=share))
            yield Change(f"--vllm_gpu_memory_utilization {share:g}", "a smaller cache", replace(run, vllm=vllm))
    yield from _offloaded(run)


def _offloaded(run: Run) -> Iterator[Change]:
    training = replace(run.training, offload_model=True, offload_optimizer=True, offload_grad=True)
    vllm = None if run.vllm is None else replace(run.vllm, sleep_level=run.vllm.sleep_level or 2)
    if (training, vllm) == (run.training, run.vllm):
        return
    flags = "--offload_model true --offload_optimizer true --offload_grad true"
    if run.vllm is not None and run.vllm.sleep_level == 0:
        flags += " --sleep_level 2"
    yield Change(flags, "copies to the host in every rollout", replace(run, training=training, vllm=vllm))


def _smaller_budgets(run: Run) -> Iterator[Change]:
    smallest = max(_SMALLEST_BUDGET, run.longest_sample)
    budget = run.training.tokens.packed
    while budget > smallest:
        budget = max(budget // 2, smallest)
        change = replace(run, training=with_budget(run.training, budget))
        yield Change(f"--max_tokens_per_micro_batch {budget}", "smaller matrix products", change)


def _recomputed_elementwise(run: Run) -> Iterator[Change]:
    if run.training.recompute == Recompute():
        training = replace(run.training, recompute=Recompute(elementwise=True))
        yield Change("--recompute_elementwise true", "about 1 % of a step", replace(run, training=training))


def _recomputed(run: Run) -> Iterator[Change]:
    if run.training.recompute.granularity == "full":
        return
    training = replace(run.training, recompute=Recompute("full", "uniform", 1))
    whole = Change(
        "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1",
        "a third more FLOPs",
        replace(run, training=training),
    )
    yield whole
    for change in _smaller_budgets(whole.run):
        yield _joined(whole, change)


def _larger_tensor_parallel(run: Run) -> Iterator[Change]:
    layout = run.training.layout
    size = layout.tensor_model_parallel_size * 2
    while size <= _LARGEST_TENSOR_PARALLEL:
        ranks = max(layout.world_size, size * layout.pipeline_model_parallel_size * layout.context_parallel_size)
        divided = replace(layout, tensor_model_parallel_size=size, sequence_parallel=True, world_size=ranks)
        flags = f"--tensor_model_parallel_size {size} --sequence_parallel true{_gpus(layout, ranks)}"
        yield Change(flags, "all-gathers in every layer", _with_layout(run, divided))
        size *= 2


def _divided_engine(run: Run) -> Iterator[Change]:
    """Divide vLLM's weights over more ranks, which leaves room for the trainer's while they are sent."""
    if run.vllm is None:
        return
    world, size = run.training.layout.world_size, run.vllm.engine.ranks * 2
    while size <= _LARGEST_TENSOR_PARALLEL and world % size == 0:
        vllm = replace(run.vllm, engine=replace(run.vllm.engine, ranks=size))
        cost = "all-reduces in every layer of generation"
        yield Change(f"--vllm_tensor_parallel_size {size}", cost, replace(run, vllm=vllm))
        size *= 2


def _more_gpus(run: Run) -> Iterator[Change]:
    """Add data-parallel ranks, which share the optimizer's states."""
    if not run.training.shards_optimizer or run.training.lora_rank is not None:
        return
    layout = run.training.layout
    ranks = layout.world_size * 2
    while ranks <= _MOST_GPUS:
        yield Change(f"{ranks} GPUs", "GPUs", _with_layout(run, replace(layout, world_size=ranks)))
        ranks *= 2


def _optimizer_on_cpu(run: Run) -> Iterator[Change]:
    if run.training.optimizer_on_cpu == 0 and run.training.lora_rank is None:
        training = replace(run.training, optimizer_on_cpu=1.0)
        cost = "a slower optimizer step, and memory of the host"
        yield Change("--optimizer_cpu_offload true", cost, replace(run, training=training))


def _adapters(run: Run) -> Iterator[Change]:
    if run.training.lora_rank is None:
        training = replace(run.training, lora_rank=16, frozen_reference=False)
        flags = "--tuner_type lora --lora_rank 16 --target_modules all-linear"
        whole = Change(flags, "adapters are trained instead of all weights", replace(run, training=training))
        yield whole
        for change in _smaller_budgets(whole.run):
            yield _joined(whole, change)


def _gpus(layout: Layout, ranks: int) -> str:
    return "" if ranks == layout.world_size else f" on {ranks} GPUs"


def _with_layout(run: Run, layout: Layout) -> Run:
    return replace(run, training=replace(run.training, layout=layout))
