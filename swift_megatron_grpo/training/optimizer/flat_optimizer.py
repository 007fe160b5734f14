"""Lets the distributed optimizer update a few large tensors instead of thousands of small ones.

Upstream: gradient norm, clipping, and Transformer Engine's FusedAdam loop over tensors in Python, 35 to 73 microseconds
for each in a step (benchmarks: moe-30b-a3b-lora), and adapters on all experts of Qwen3-30B-A3B are almost 25,000
tensors, which the GPU updates in a few milliseconds.

Fix: parameters of a group (learning rate, weight decay) that follow each other in Megatron's buffers make a run, for
which Adam has one tensor during an optimizer step. Adam is elementwise, so its results are the same bit by bit. The
gradient norm has the gradients that upstream would count, joined where they follow each other. It adds them in another
order, so that its last bit may differ, and with it all gradients that are clipped.

Between steps everything is as upstream left it: the groups contain one shard for each parameter, with states of its own
for checkpoints and offloading. The memory is that of the runs: a shard and its states are views.

The precision-aware optimizer, float8, gradients that are not fp32 and optimizers on the CPU are left to upstream.

Tests: tests/dist/test_flat_optimizer.py, on a GPU tests/gpu/test_flat_optimizer.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import Adam, DistributedOptimizer

from swift_megatron_grpo.training.optimizer.optimizer_copies import Places, is_covered, places_of, using_places

# Numbers of a run: building one needs as much memory a second time, 256 MiB in fp32, and kernels count in 32 bits.
LARGEST = 2**26

# From megatron-core 0.19 on, the method has another name, and can return the gradients of a group with its own norm.
NORM_METHOD = next(
    name for name in ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm") if name in vars(MegatronOptimizer)
)

States = defaultdict[torch.Tensor, dict[str, Any]]
# Read by the norm alone, which has its own list.
_MARKS = {"tensor_model_parallel", "partition_dim", "partition_stride", "shared"}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a buffer, which `whole` contains end to end."""

    shards: list[torch.Tensor]  # fp32 weights of this rank, each [n] and a view of `whole`
    whole: torch.Tensor  # [sum of n] fp32; the shard itself if there is only one

    def parts(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each shard, and its part of `values`, which has one value for each weight of the run."""
        return zip(self.shards, values.split([shard.numel() for shard in self.shards]), strict=True)


@dataclass(slots=True)
class _Flat:
    """The runs of one optimizer, and the states of Adam in both forms."""

    places: Places  # of whole runs
    groups: list[list[Run]]  # for each group of parameters, which may be empty
    for_norm: list[torch.Tensor]  # gradients that this rank counts
    whole_states: States = field(default_factory=lambda: defaultdict(dict))
    shard_states: States | None = None  # the optimizer's own; None: not seen yet
    shards_with_states: int = 0


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
        if isinstance(link, DistributedOptimizer) and is_covered(link) and type(link.optimizer) is Adam:
            yield link


@contextmanager
def _stepping(link: DistributedOptimizer) -> Iterator[None]:
    runs, inner = _find_runs(link), link.optimizer
    shard_states: States = inner.state
    of_groups = [group["params"] for group in inner.param_groups]
    for group, of_group in zip(inner.param_groups, runs.groups, strict=True):
        group["params"] = [run.whole for run in of_group]
    inner.state = runs.whole_states
    upstream = getattr(link, NORM_METHOD)
    setattr(link, NORM_METHOD, lambda *group: upstream(*group) if any(group) else runs.for_norm)
    try:
        with using_places(link, runs.places):
            yield
    finally:
        for group, params in zip(inner.param_groups, of_groups, strict=True):
            group["params"] = params
        inner.state = shard_states
        delattr(link, NORM_METHOD)
        for run in _runs(runs):
            run.whole.grad = None
        if len(shard_states) < sum(len(params) for params in of_groups):  # Adam creates states in its first step
            _share_states(runs, shard_states)


def _find_runs(link: DistributedOptimizer) -> _Flat:
    """Return the runs, found anew if the buffers have other memory; take over states that a checkpoint has set."""
    places, known = places_of(link), _flats.get(link)
    if known is None or known.places.memory != places.memory:
        torch.cuda.synchronize()  # a reload may still be under way
        known = _flats[link] = _join_neighbours(link, places)
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
def _join_neighbours(link: DistributedOptimizer, places: Places) -> _Flat:
    index_of = {id(main): index for index, main in enumerate(places.mains)}
    wholes: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    parameters: list[torch.Tensor] = []
    groups: list[list[Run]] = []
    for group in link.optimizer.param_groups:
        groups.append([])
        indices = [index_of[id(main)] for main in group["params"]]
        for run in _split(indices, places):
            shards = [places.mains[index] for index in run]
            numel = sum(shard.numel() for shard in shards)
            gradients.append(_spanning(places.gradients[run[0]], numel))
            parameters.append(_spanning(places.parameters[run[0]], numel))
            wholes.append(_join_weights(shards, parameters[-1]))
            groups[-1].append(Run(shards, wholes[-1]))
    return _Flat(Places(places.memory, wholes, gradients, parameters), groups, _joined(_counted_in_norm(link, places)))


def _split(indices: Sequence[int], places: Places) -> Iterator[list[int]]:
    """Divide the parameters of a group, in the order of their buffers, into runs."""
    run: list[int] = []
    numel = 0
    for index in indices:
        size = places.mains[index].numel()
        if run and (numel + size > LARGEST or not _joins(run[-1], index, places)):
            yield run
            run, numel = [], 0
        run.append(index)
        numel += size
    if run:
        yield run


def _joins(one: int, other: int, places: Places) -> bool:
    return (
        _adjacent(places.gradients[one], places.gradients[other])
        and _adjacent(places.parameters[one], places.parameters[other])
        and _attributes(places.mains[one]) == _attributes(places.mains[other])
    )


def _adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype == other.dtype
    return same and one.storage_offset() + one.numel() == other.storage_offset()


def _attributes(main: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(main).items() if name not in _MARKS}


def _counted_in_norm(link: DistributedOptimizer, places: Places) -> list[torch.Tensor]:
    """Return the gradients that Megatron counts on this rank: neither shared nor replicas of another rank's."""
    for main, gradient in zip(places.mains, places.gradients, strict=True):
        main.grad = gradient
    counted: list[torch.Tensor] = getattr(link, NORM_METHOD)()
    for main in places.mains:
        main.grad = None
    return counted


def _joined(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the same gradients, one for those that follow each other, up to the largest size."""
    spans: list[torch.Tensor] = []
    for gradient in gradients:
        if spans and _adjacent(spans[-1], gradient) and spans[-1].numel() + gradient.numel() <= LARGEST:
            spans[-1] = _spanning(spans[-1], spans[-1].numel() + gradient.numel())
        else:
            spans.append(gradient)
    return spans


def _spanning(first: torch.Tensor, numel: int) -> torch.Tensor:
    """Return a view, [numel], that begins where `first` does."""
    return first.detach().as_strided((numel,), (1,))


def _join_weights(shards: list[torch.Tensor], parameters: torch.Tensor) -> torch.Tensor:
    """Return the weights of a run, of which the shards become views."""
    first = shards[0]
    if len(shards) == 1:
        return first
    if first.data_ptr() == parameters.data_ptr():  # fp32: the shards are views of the model's own weights
        whole = parameters
    else:
        whole = torch.cat(shards)
        for shard, part in Run(shards, whole).parts(whole):
            shard.data = part
    vars(whole).update(vars(first))
    return whole


@torch.no_grad()
def _join_states(runs: _Flat, states: States) -> None:
    for run in _runs(runs):
        runs.whole_states[run.whole] = {
            name: torch.cat([states[shard][name] for shard in run.shards]) if len(run.shards) > 1 else value
            for name, value in states[run.shards[0]].items()
        }


def _share_states(runs: _Flat, states: States) -> None:
    """Make the states of shards views of those of whole runs."""
    for run in _runs(runs):
        for name, values in runs.whole_states.get(run.whole, {}).items():
            for shard, part in run.parts(values):
                states[shard][name] = part
    runs.shard_states, runs.shards_with_states = states, len(states)


def _runs(runs: _Flat) -> Iterator[Run]:
    return (run for of_group in runs.groups for run in of_group)
