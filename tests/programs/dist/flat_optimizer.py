"""Run the same steps with one tensor for each parameter in the optimizer, and with runs of them, on any ranks.

Checkpoints of the optimizer after the first step of one run are continued by the other.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from swift_megatron_grpo.cli.check_layouts.ranks import megatron_torn_down
from swift_megatron_grpo.training import engine
from swift_megatron_grpo.training.optimizer import flat_optimizer
from tests.programs.dist.offloading import EVERYTHING, Run, Step, differing

STEPS, SAVED_AFTER = 3, 1


@dataclass(frozen=True)
class Steps:
    """Steps of a run, the first of which has the number `first`."""

    first: int
    done: list[Step]
    saved: list[dict[str, Any]]  # of each of Megatron's optimizers, and the scheduler, after SAVED_AFTER steps
    tensors: int  # of all runs of parameters
    runs: int


@dataclass(frozen=True)
class Comparison:
    losses_equal: bool
    first_norm_off: float  # relative; weights are equal so far
    norms_off: float  # of all steps
    weights_differ: list[str]
    trained: bool


def main(out: str, flags: list[str]) -> None:
    with upstream_tensors():
        stock = steps(flags, None)
    flat = steps(flags, None)
    runs = {"same steps": flat, "a checkpoint of upstream": steps(flags, stock.saved)}
    with upstream_tensors():
        runs["a checkpoint of runs"] = steps(flags, flat.saved)
        if torch.cuda.is_available():  # kernels may add in an order that varies
            runs["upstream again"] = steps(flags, None)
    report: dict[str, Any] = {name: asdict(compare(stock, run)) for name, run in runs.items()}
    report |= {"tensors": flat.tensors, "runs": flat.runs}
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def steps(flags: list[str], loaded: list[dict[str, Any]] | None) -> Steps:
    """Run all steps, or those after the checkpoint."""
    flat_optimizer._flats.clear()
    with megatron_torn_down():
        run, done, saved = Run(flags, EVERYTHING), list[Step](), list[dict[str, Any]]()
        first = 0 if loaded is None else SAVED_AFTER
        if loaded is not None:
            load(run, loaded)
        for seed in range(first, STEPS):
            done.append(run.step(seed))
            if seed + 1 == SAVED_AFTER:
                saved = save(run)
        runs = [of_link for link in _links(run) for of_link in _runs_of(link)]
        tensors, count = sum(len(of_run.shards) for of_run in runs), len(runs)
        del run, runs
    return Steps(first, done, saved, tensors, count)


def save(run: Run) -> list[dict[str, Any]]:
    """Copy what a checkpoint has of this rank's optimizers, in Megatron's own form."""
    states = []
    for link in _links(run):
        tensors = link.get_parameter_state_dp_reshardable()
        for buffer in (buffer for name, buffer in tensors.items() if isinstance(name, int)):
            for of_parameter in (each for buckets in buffer.values() for bucket in buckets for each in bucket):
                of_parameter["padding"] = False  # Megatron adds it, and padding, when it writes the file
        state = {**link.state_dict(), "param_state": tensors}
        states.append(copied({**state, "param_state_sharding_type": "dp_reshardable"}))
    return [*states, copied(run.trainer.opt_param_scheduler.state_dict())]


def copied(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if torch.is_tensor(leaf) else leaf, state)


@torch.no_grad()
def load(run: Run, states: list[dict[str, Any]]) -> None:
    *of_links, scheduler = states
    run.trainer.opt_param_scheduler.load_state_dict(scheduler)
    for link, state in zip(_links(run), of_links, strict=True):
        link.load_state_dict(copied(state))
        link._copy_main_params_to_model_params()
    for model in run.trainer.wrapped_models:
        model.start_param_sync(force_sync=True)


def compare(expected: Steps, actual: Steps) -> Comparison:
    pairs = list(zip(expected.done[actual.first :], actual.done, strict=True))
    norms = [(a.metrics.pop("grad_norm"), b.metrics.pop("grad_norm")) for a, b in copy.deepcopy(pairs)]
    without = [({**a.metrics, "grad_norm": 0.0}, {**b.metrics, "grad_norm": 0.0}) for a, b in pairs]
    off = [abs(a - b) / a for a, b in norms]
    return Comparison(
        losses_equal=all(a == b for a, b in without),
        first_norm_off=off[0],
        norms_off=max(off),
        weights_differ=sorted({name for a, b in pairs for name in differing(a, b)}),
        trained=all(norm > 0 for norm, _ in norms) and len(differing(actual.done[0], actual.done[-1])) > 0,
    )


@contextmanager
def upstream_tensors() -> Iterator[None]:
    engine.flat, engine.flatten = lambda _: nullcontext(), lambda _: None
    try:
        yield
    finally:
        assert not flat_optimizer._flats
        engine.flat, engine.flatten = flat_optimizer.flat, flat_optimizer.flatten


def _links(run: Run) -> list[Any]:
    optimizer = run.trainer.optimizer
    return list(vars(optimizer).get("chained_optimizers", [optimizer]))


def _runs_of(link: Any) -> list[flat_optimizer.Run]:
    flat = flat_optimizer._flats.get(link)
    return [] if flat is None else [run for of_group in flat.groups for run in of_group]
