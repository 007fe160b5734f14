"""Lets the distributed optimizer update a few large tensors instead of thousands of small ones.

Upstream: gradient norm, clipping, and Transformer Engine's FusedAdam loop over tensors in Python, 35 to 73 microseconds
for each in a step (benchmarks: moe-30b-a3b-lora). `DistributedOptimizer` also looks up the memory of each parameter in
three dictionaries, and copies it by a separate kernel, twice in each step. Adapters on all experts of Qwen3-30B-A3B
are almost 25,000 tensors, which the GPU updates in a few milliseconds.

Fix: parameters of a group (learning rate, weight decay) that follow each other in Megatron's buffers make a run, for
which Adam has one tensor during an optimizer step. Adam is elementwise, so its results are the same bit by bit. The
gradient norm has the gradients that upstream would count, joined where they follow each other. It adds them in another
order, so that its last bit may differ, and with it all gradients that are clipped. All runs are copied by one call. A
run has 2^26 numbers at most: building it needs as much memory a second time, and kernels count in 32 bits.

Between steps everything is as upstream left it: the groups contain one shard for each parameter, with separate states
for checkpoints and offloading. These are views of the memory of the runs.

Optimizers other than Adam, the precision-aware one, float8, gradients that are not fp32, Megatron's FSDP and optimizers
on the CPU are left to upstream.

Tests: tests/dist/test_flat_optimizer.py, on a GPU tests/gpu/test_flat_optimizer.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import Adam, DistributedOptimizer

from swift_megatron_grpo.training.optimizer.adam_portions import portions

# From megatron-core 0.19 on, the method has another name, and can return the gradients of a group with its own norm.
NORM_METHOD = next(
    name for name in ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm") if name in vars(MegatronOptimizer)
)

States = defaultdict[torch.Tensor, dict[str, Any]]
# Read by the norm alone, which has its own list.
_MARKS = {"tensor_model_parallel", "partition_dim", "partition_stride", "shared"}


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this rank updates, [n] each."""

    main: torch.Tensor  # fp32 weights of the optimizer
    gradient: torch.Tensor  # in Megatron's buffer
    parameter: torch.Tensor  # the model's weights, in Megatron's buffer


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in the buffers, as one tensor."""

    shards: list[torch.Tensor]  # fp32 weights, each [n] and a view of `whole`
    whole: torch.Tensor  # [sum of n] fp32; the shard itself if there is only one
    gradient: torch.Tensor  # [sum of n], and so is the next
    parameter: torch.Tensor

    def parts(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each shard, and its part of `values`, which has one value for each weight of the run."""
        return zip(self.shards, values.split([shard.numel() for shard in self.shards]), strict=True)


@dataclass(slots=True)
class _Flat:
    """The runs of one optimizer, and the states of Adam in both forms."""

    memory: list[int]  # of the buffers
    groups: list[list[Run]]  # for each group of parameters, which may be empty
    for_norm: list[torch.Tensor]  # gradients that this rank counts
    whole_states: States = field(default_factory=lambda: defaultdict(dict))
    shard_states: States | None = None  # the optimizer's own; None: not seen yet
    shards_with_states: int = 0

    @property
    def runs(self) -> list[Run]:
        return [run for of_group in self.groups for run in of_group]

    def pass_gradients(self) -> None:
        for run in self.runs:
            run.whole.grad = run.gradient

    def copy_results(self) -> None:
        torch._foreach_copy_([run.parameter for run in self.runs], [run.whole for run in self.runs])


_flats: WeakKeyDictionary[DistributedOptimizer, _Flat] = WeakKeyDictionary()


def flatten(optimizer: MegatronOptimizer) -> None:
    """Make the runs; all weights and states must be on their device. Nothing changes until `flat` is entered."""
    for link in _covered_links(optimizer):
        _find_runs(link)


@contextmanager
def flat(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Let the optimizer step over runs inside the context."""
    with ExitStack() as stack:
        for link in _covered_links(optimizer):
            stack.enter_context(_stepping(link))
        yield


def _covered_links(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for link in chain:
        if (
            isinstance(link, DistributedOptimizer)
            and not link.is_stub_optimizer
            and type(link.optimizer) is Adam
            and not link.ddp_config.use_megatron_fsdp
            and not link.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            and all(buffer.grad_dtype == torch.float32 for buffer in link.buffers)
            and all(buffer.param_dtype != torch.uint8 for buffer in link.buffers)  # float8
        ):
            yield link


@contextmanager
def _stepping(link: DistributedOptimizer) -> Iterator[None]:
    flat = _find_runs(link)
    inner = link.optimizer
    shard_states: States = inner.state
    shards_of_groups = [group["params"] for group in inner.param_groups]
    for group, runs in zip(inner.param_groups, flat.groups, strict=True):
        group["params"] = [run.whole for run in runs]
    inner.state = flat.whole_states
    upstream_norm = getattr(link, NORM_METHOD)
    replaced = {
        NORM_METHOD: lambda *group: upstream_norm(*group) if any(group) else flat.for_norm,
        "_copy_model_grads_to_main_grads": flat.pass_gradients,
        "_copy_main_params_to_model_params": flat.copy_results,
    }
    vars(link).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            delattr(link, name)
        for group, shards in zip(inner.param_groups, shards_of_groups, strict=True):
            group["params"] = shards
        inner.state = shard_states
        for run in flat.runs:
            run.whole.grad = None
        if len(shard_states) < sum(map(len, shards_of_groups)):  # Adam creates states in its first step
            _share_states(flat, shard_states)


def _find_runs(link: DistributedOptimizer) -> _Flat:
    """Return the runs, made again for other buffers (offloading keeps them); adopt states that a checkpoint set."""
    memory = [
        data.untyped_storage()._cdata for buffer in link.buffers for data in (buffer.grad_data, buffer.param_data)
    ]
    known = _flats.get(link)
    if known is None or known.memory != memory:
        torch.cuda.synchronize()  # a reload may still be under way
        known = _flats[link] = _join_neighbours(link, memory)
    states: States = link.optimizer.state
    # Loading replaces the dictionary.
    if known.shards_with_states != len(states) or known.shard_states is not states:
        torch.cuda.synchronize()
        known.whole_states.clear()
        if states:
            _join_states(known, states)
        _share_states(known, states)
    return known


@torch.no_grad()
def _join_neighbours(link: DistributedOptimizer, memory: list[int]) -> _Flat:
    def numel(shard: Shard) -> int:
        return shard.main.numel()

    shards = {id(shard.main): shard for shard in _shards(link)}
    groups = [
        [_join(run) for run in portions((shards[id(main)] for main in group["params"]), numel, _is_followed_by)]
        for group in link.optimizer.param_groups
    ]
    return _Flat(memory, groups, _joined(_counted_in_norm(link, list(shards.values()))))


def _shards(link: DistributedOptimizer) -> Iterator[Shard]:
    for groups, groups_of_mains in (
        (link.model_float16_groups, link.shard_fp32_from_float16_groups),
        (link.model_fp32_groups, link.shard_fp32_groups),
    ):
        for parameters, mains in zip(groups, groups_of_mains, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                ranges = link._get_model_param_range_map(parameter)
                of_parameter = ranges["param"]
                of_bucket = ranges["gbuf_world_in_bucket"]
                assert of_parameter.size == of_bucket.size == main.nelement()
                buffer, _, number = link.model_param_gbuf_map[parameter]
                bucket = link.buffers[buffer].buckets[number]
                yield Shard(
                    main,
                    gradient=parameter.main_grad.view(-1)[of_parameter.start : of_parameter.end],
                    parameter=bucket.param_data.view(-1)[of_bucket.start : of_bucket.end],
                )


def _join(shards: Sequence[Shard]) -> Run:
    """Make a run, whose memory becomes that of the shards' weights."""
    mains = [shard.main for shard in shards]
    numel = sum(main.numel() for main in mains)
    parameter = _spanning(shards[0].parameter, numel)
    whole = mains[0]
    if len(mains) > 1:
        in_model = mains[0].data_ptr() == parameter.data_ptr()  # fp32: the shards are views of the model's own weights
        whole = parameter if in_model else torch.cat(mains)
        vars(whole).update(vars(mains[0]))
    run = Run(mains, whole, _spanning(shards[0].gradient, numel), parameter)
    if len(mains) > 1 and whole is not parameter:
        for main, part in run.parts(whole):
            main.data = part
    return run


def _is_followed_by(one: Shard, other: Shard) -> bool:
    """Return True if both can be updated as one tensor."""
    buffers = _adjacent(one.gradient, other.gradient) and _adjacent(one.parameter, other.parameter)
    return buffers and _attributes(one.main) == _attributes(other.main)


def _adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype == other.dtype
    return same and one.storage_offset() + one.numel() == other.storage_offset()


def _attributes(main: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(main).items() if name not in _MARKS}


def _counted_in_norm(link: DistributedOptimizer, shards: Sequence[Shard]) -> list[torch.Tensor]:
    """Return the gradients that Megatron counts on this rank: neither shared nor replicas of another rank's."""
    for shard in shards:
        shard.main.grad = shard.gradient
    counted: list[torch.Tensor] = getattr(link, NORM_METHOD)()
    for shard in shards:
        shard.main.grad = None
    return counted


def _joined(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the same gradients, one for those that follow each other, up to the largest size."""
    runs = portions(gradients, is_followed_by=_adjacent)
    return [_spanning(run[0], sum(gradient.numel() for gradient in run)) for run in runs]


def _spanning(first: torch.Tensor, numel: int) -> torch.Tensor:
    """Return a view, [numel], that begins where `first` does."""
    return first.detach().as_strided((numel,), (1,))


@torch.no_grad()
def _join_states(flat: _Flat, states: States) -> None:
    for run in flat.runs:
        flat.whole_states[run.whole] = {
            name: torch.cat([states[shard][name] for shard in run.shards]) if len(run.shards) > 1 else value
            for name, value in states[run.shards[0]].items()
        }


def _share_states(flat: _Flat, states: States) -> None:
    """Make the states of shards views of the states of whole runs."""
    for run in flat.runs:
        for name, values in flat.whole_states.get(run.whole, {}).items():
            for shard, part in run.parts(values):
                states[shard][name] = part
    flat.shard_states = states
    flat.shards_with_states = len(states)
