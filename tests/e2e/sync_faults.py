"""An external plugin for tests: faults on the way from the trainer to vLLM, here or in a server, in a real run.

FAULTS names a scenario: before which step which faults are planted, one after the other. What the run says of each goes
to faults.RANK.json in --output_dir, then the step is done without. The faults before LAST stay, and end the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mcore_bridge import LoraParallelLinear

import swift_megatron_grpo.weights.export as export
from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import Generation, NamedWeights, Progress, Request
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.types import Rollout

Fault = Callable[[GRPOLoop], AbstractContextManager[None]]
Change = Callable[[NamedWeights], NamedWeights]
TENSOR = "model.layers.1.mlp.experts.2.up_proj.weight"
EXPERTS = ("model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.1.")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def without(weights: NamedWeights) -> NamedWeights:
    return ((name, tensor) for name, tensor in weights if name != TENSOR)


def swapped(weights: NamedWeights) -> NamedWeights:
    one, other = EXPERTS
    for name, tensor in weights:
        if name.startswith(one):
            yield name.replace(one, other), tensor
        elif name.startswith(other):
            yield name.replace(other, one), tensor
        else:
            yield name, tensor


def on_the_way(loop: GRPOLoop, change: Change, times: int = 2) -> AbstractContextManager[None]:
    """Between what was exported and the engine, in so many transfers."""
    engine: Any = loop.stages.generation
    load, left = engine.load_weights, [times]

    def load_changed(weights: NamedWeights, *args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        load(change(weights) if left[0] >= 0 else weights, *args, **kwargs)

    return replaced(engine, "load_weights", load_changed)


def in_export(change: Change) -> AbstractContextManager[None]:
    call = export.WeightExport.__call__
    return replaced(export.WeightExport, "__call__", lambda self: change(call(self)))


def tensor_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(without)


def tensor_lost_on_the_way(loop: GRPOLoop) -> AbstractContextManager[None]:
    return on_the_way(loop, without)


def tensor_lost_once(loop: GRPOLoop) -> AbstractContextManager[None]:
    return on_the_way(loop, without, times=1)


def experts_swapped_on_the_way(loop: GRPOLoop) -> AbstractContextManager[None]:
    return on_the_way(loop, swapped)


def experts_swapped_in_export(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(swapped)


@contextmanager
def experts_swapped_for_one_engine(loop: GRPOLoop) -> Iterator[None]:
    """That of rank 1; or of rank 0, which alone speaks to servers."""
    speaker = 0 if isinstance(loop.stages.generation, RemoteVllm) else 1
    if torch.distributed.get_rank() != speaker:
        yield
        return
    with on_the_way(loop, swapped):
        yield


@dataclass
class Changed:
    """A generation that tells other completions than were made."""

    generation: Generation
    change: Callable[[Rollout], Rollout]

    @property
    def is_running(self) -> bool:
        return self.generation.is_running

    def next(self, newest: int) -> Progress:
        progress = self.generation.next(newest)
        return replace(progress, finished={index: self.change(rollout) for index, rollout in progress.finished.items()})


def answering(loop: GRPOLoop, change: Callable[[Rollout], Rollout]) -> AbstractContextManager[None]:
    engine: Any = loop.stages.generation
    generate = engine.generate
    return replaced(engine, "generate", lambda *args: Changed(generate(*args), change))


def logprobs_shifted(loop: GRPOLoop) -> AbstractContextManager[None]:
    loop._compared_with_engine = False
    return answering(loop, lambda told: replace(told, logprobs=[*told.logprobs[1:], told.logprobs[0]]))  # type: ignore[misc, index]


def temperature_not_heeded(loop: GRPOLoop) -> AbstractContextManager[None]:
    engine: Any = loop.stages.generation
    generate = engine.generate
    loop._compared_with_engine = False

    def heedless(requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        told: Generation = generate(requests, group_size, replace(sampling, temperature=1.0))
        return told

    return replaced(engine, "generate", heedless)


def older_weights_answer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return answering(loop, lambda told: replace(told, weights_version=told.weights_version - 1))


def adapter_bound_to_nothing(loop: GRPOLoop) -> AbstractContextManager[None]:
    return replaced(export, "_adapted", lambda module: [])


def adapter_merged_as_zeros(loop: GRPOLoop) -> AbstractContextManager[None]:
    deltas = LoraParallelLinear.get_delta_weights

    def zeros(self: Any, adapter: str) -> list[torch.Tensor]:
        return [torch.zeros_like(delta) for delta in deltas(self, adapter)]

    return replaced(LoraParallelLinear, "get_delta_weights", zeros)


def one_adapter_of_a_layer_left_out(loop: GRPOLoop) -> AbstractContextManager[None]:
    merge = export._merged
    return replaced(export, "_merged", lambda modules, told: merge(list(modules)[1:], told))


SCENARIOS: dict[str, dict[int, list[Fault]]] = {
    "experts": {
        0: [tensor_lost_on_the_way],
        1: [tensor_not_sent, experts_swapped_in_export],
        2: [tensor_lost_on_the_way, experts_swapped_on_the_way, logprobs_shifted, older_weights_answer],
        3: [tensor_lost_once],
        5: [temperature_not_heeded],
    },
    "adapter": {19: [adapter_bound_to_nothing, adapter_merged_as_zeros, one_adapter_of_a_layer_left_out]},
}
LAST: dict[str, tuple[int, list[Fault]]] = {"experts": (7, [experts_swapped_for_one_engine]), "adapter": (-1, [])}
scenario = os.environ["FAULTS"]
told: dict[str, Any] = {}
base: dict[str, torch.Tensor] = {}
step = GRPOLoop.step


def step_with_faults(self: GRPOLoop) -> dict[str, float]:
    done = self._weights_version
    models = self.stages.sync.export._models
    frozen = {name: each for model in models for name, each in model.named_parameters() if not each.requires_grad}
    base.update({name: each.detach().clone() for name, each in frozen.items() if name not in base})
    for fault in SCENARIOS[scenario].get(done, []):
        told[f"{fault.__name__}, step {done}"] = story(self, fault)
    told["frozen weights"] = len(base)
    told["frozen weights that changed"] = [name for name in base if not torch.equal(base[name], frozen[name])]
    folder = Path(self.config.log.output_dir)
    (folder / f"faults.{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
    with ExitStack() as last:
        for fault in LAST[scenario][1] if done == LAST[scenario][0] else []:
            last.enter_context(fault(self))
        return step(self)


def story(loop: GRPOLoop, fault: Fault) -> str:
    engine: Any = loop.stages.generation
    generate, times = engine.generate, [0]

    def counted(*args: Any) -> Any:
        times[0] += 1
        return generate(*args)

    with replaced(engine, "generate", counted), fault(loop):
        try:
            step(loop)
        except RuntimeError as error:
            return f"{type(error).__name__}, generated {times[0]} times: {error}"
    return "nothing was said"


GRPOLoop.step = step_with_faults  # type: ignore[method-assign]
