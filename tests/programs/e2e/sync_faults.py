"""An external plugin for tests: faults in the transfer of weights from the trainer to vLLM, local or in a server.

FAULTS names a scenario: the faults to inject before a step, one after the other. The error that the run raises for each
is written to faults.RANK.json in --output_dir; then the step runs without a fault. The faults in LAST stay and end the
run.
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
from peft.tuners.lora import Linear as VisionTowerLinear

import swift_megatron_grpo.weights.export.export as export
from swift_megatron_grpo.generation.interface import Generation, NamedWeights, Progress, Request
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.training.vision_tower import VisionTowerGuard
from swift_megatron_grpo.types import ModelImage, ModelRecording, Rollout

Fault = Callable[[GRPOLoop], AbstractContextManager[None]]
Change = Callable[[NamedWeights], NamedWeights]
TENSOR = "model.layers.1.mlp.experts.2.up_proj.weight"
DELTA_NET = "model.language_model.layers.0.linear_attn.A_log"
EXPERTS = ("model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.1.")


ROUTER = "model.layers.1.mlp.gate.weight"


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


def without_tensor(weights: NamedWeights) -> NamedWeights:
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


def in_transfer(loop: GRPOLoop, change: Change, times: int = 2) -> AbstractContextManager[None]:
    """Change the weights between export and engine, in the next `times` transfers."""
    engine: Any = loop.stages.generation
    load, remaining = engine.load_weights, [times]

    def load_changed(weights: NamedWeights, *args: Any, **kwargs: Any) -> None:
        remaining[0] -= 1
        load(change(weights) if remaining[0] >= 0 else weights, *args, **kwargs)

    return replaced(engine, "load_weights", load_changed)


def in_export(change: Change) -> AbstractContextManager[None]:
    call = export.WeightExport.__call__
    return replaced(export.WeightExport, "__call__", lambda self: change(call(self)))


def tensor_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(without_tensor)


def tensor_lost_in_transfer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, without_tensor)


def tensor_lost_once(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, without_tensor, times=1)


def experts_swapped_in_transfer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, swapped)


def experts_swapped_in_export(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(swapped)


def delta_net_tensor_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(lambda weights: ((name, tensor) for name, tensor in weights if name != DELTA_NET))


def delta_net_tensor_lost_in_transfer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, lambda weights: ((name, tensor) for name, tensor in weights if name != DELTA_NET))


def _without(part: str) -> Change:
    return lambda weights: ((name, tensor) for name, tensor in weights if part not in name)


def expert_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(_without(EXPERTS[0]))


def expert_lost_in_transfer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, _without(EXPERTS[0]))


def router_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(_without(ROUTER))


def router_lost_in_transfer(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_transfer(loop, _without(ROUTER))


@contextmanager
def experts_swapped_for_one_engine(loop: GRPOLoop) -> Iterator[None]:
    """Inject the fault on rank 1; with servers on rank 0, the only rank that connects to them."""
    faulty_rank = 0 if isinstance(loop.stages.generation, RemoteVllm) else 1
    if torch.distributed.get_rank() != faulty_rank:
        yield
        return
    with in_transfer(loop, swapped):
        yield


@dataclass
class ChangedGeneration:
    """A generation that returns changed rollouts."""

    generation: Generation
    change: Callable[[Rollout], Rollout]

    @property
    def is_running(self) -> bool:
        return self.generation.is_running

    def next(self, newest: int) -> Progress:
        progress = self.generation.next(newest)
        return replace(progress, finished={index: self.change(rollout) for index, rollout in progress.finished.items()})


def changed_rollouts(loop: GRPOLoop, change: Callable[[Rollout], Rollout]) -> AbstractContextManager[None]:
    engine: Any = loop.stages.generation
    generate = engine.generate
    return replaced(engine, "generate", lambda *args: ChangedGeneration(generate(*args), change))


def _shift_logprobs(rollout: Rollout) -> Rollout:
    assert rollout.logprobs is not None
    return replace(rollout, logprobs=[*rollout.logprobs[1:], rollout.logprobs[0]])


def _report_no_experts(rollout: Rollout) -> Rollout:
    """Return the rollout as a kernel leaves it that chooses the experts of the last layer itself."""
    assert rollout.routed_experts is not None
    rows = rollout.routed_experts.copy()
    rows[:, -1] = 0
    return replace(rollout, routed_experts=rows)


def experts_not_reported(loop: GRPOLoop) -> AbstractContextManager[None]:
    return changed_rollouts(loop, _report_no_experts)


def logprobs_shifted(loop: GRPOLoop) -> AbstractContextManager[None]:
    loop._batches._compared_with_engine = False
    return changed_rollouts(loop, _shift_logprobs)


def temperature_not_applied(loop: GRPOLoop) -> AbstractContextManager[None]:
    engine: Any = loop.stages.generation
    generate = engine.generate
    loop._batches._compared_with_engine = False

    def generate_at_temperature_1(requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        generation: Generation = generate(requests, group_size, replace(sampling, temperature=1.0))
        return generation

    return replaced(engine, "generate", generate_at_temperature_1)


def rollouts_of_older_weights(loop: GRPOLoop) -> AbstractContextManager[None]:
    return changed_rollouts(loop, lambda rollout: replace(rollout, weights_version=rollout.weights_version - 1))


def adapter_bound_to_nothing(loop: GRPOLoop) -> AbstractContextManager[None]:
    return replaced(loop.stages.sync.export, "_adapted", export.AdaptedModules({}, []))


def adapter_merged_as_zeros(loop: GRPOLoop) -> AbstractContextManager[None]:
    merge = export.merged_weights

    def zeros(module: Any, adapter: str) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        return [(weight, weight.data.clone()) for weight, _ in merge(module, adapter)]

    return replaced(export, "merged_weights", zeros)


def one_adapter_of_a_layer_left_out(loop: GRPOLoop) -> AbstractContextManager[None]:
    merge = export._merged
    return replaced(export, "_merged", lambda modules, merged: merge(list(modules)[1:], merged))


def vision_tower_not_sent(loop: GRPOLoop) -> AbstractContextManager[None]:
    return in_export(lambda weights: ((name, tensor) for name, tensor in weights if ".visual." not in name))


def medium_of_zeros(kind: type) -> AbstractContextManager[None]:
    rows_of = VisionTowerGuard._rows_of

    def zeros(self: VisionTowerGuard, shown: Any, *how: Any) -> Any:
        rows = rows_of(self, shown, *how)
        return tuple(map(torch.zeros_like, rows)) if isinstance(shown[0], kind) else rows

    return replaced(VisionTowerGuard, "_rows_of", zeros)


def image_of_zeros(loop: GRPOLoop) -> AbstractContextManager[None]:
    return medium_of_zeros(ModelImage)


def recording_of_zeros(loop: GRPOLoop) -> AbstractContextManager[None]:
    return medium_of_zeros(ModelRecording)


def vision_tower_adapters_left_out(loop: GRPOLoop) -> AbstractContextManager[None]:
    merge = export._merged

    def without_towers(modules: Any, merged: Any) -> AbstractContextManager[None]:
        return merge([module for module in modules if isinstance(module, LoraParallelLinear)], merged)

    return replaced(export, "_merged", without_towers)


def vision_tower_adapters_merged_as_zeros(loop: GRPOLoop) -> AbstractContextManager[None]:
    delta = VisionTowerLinear.get_delta_weight
    return replaced(VisionTowerLinear, "get_delta_weight", lambda self, adapter: torch.zeros_like(delta(self, adapter)))


SCENARIOS: dict[str, dict[int, list[Fault]]] = {
    "experts": {
        0: [tensor_lost_in_transfer],
        1: [tensor_not_sent, experts_swapped_in_export],
        2: [tensor_lost_in_transfer, experts_swapped_in_transfer, logprobs_shifted, rollouts_of_older_weights],
        3: [tensor_lost_once],
        5: [temperature_not_applied],
    },
    "routers": {
        1: [expert_not_sent, router_not_sent, experts_swapped_in_export],
        # one a step: the engine has received everything else, and keeps it
        2: [router_lost_in_transfer],
        3: [expert_lost_in_transfer],
        4: [experts_swapped_in_transfer, experts_not_reported],
    },
    "delta net": {0: [delta_net_tensor_not_sent], 1: [delta_net_tensor_lost_in_transfer]},
    "towers": {2: [vision_tower_not_sent, vision_tower_adapters_left_out, vision_tower_adapters_merged_as_zeros]},
    "image": {1: [image_of_zeros]},
    "recording": {1: [recording_of_zeros]},
    "adapter": {19: [adapter_bound_to_nothing, adapter_merged_as_zeros, one_adapter_of_a_layer_left_out]},
}
LAST: dict[str, tuple[int, list[Fault]]] = {"experts": (7, [experts_swapped_for_one_engine])}
scenario = os.environ["FAULTS"]
reports: dict[str, Any] = {}
base: dict[str, torch.Tensor] = {}
step = GRPOLoop.train_step


def step_after_faults(self: GRPOLoop) -> dict[str, float]:
    done = self._weights_version
    models = self.stages.sync.export._models
    weights = (named for model in models for named in model.named_parameters())
    frozen = {name: weight for name, weight in weights if not weight.requires_grad}
    base.update({name: weight.detach().clone() for name, weight in frozen.items() if name not in base})
    for fault in SCENARIOS[scenario].get(done, []):
        reports[f"{fault.__name__}, step {done}"] = step_with_fault(self, fault)
    reports["frozen weights"] = len(base)
    reports["frozen weights that changed"] = [name for name in base if not torch.equal(base[name], frozen[name])]
    folder = Path(self.config.log.output_dir)
    (folder / f"faults.{torch.distributed.get_rank()}.json").write_text(json.dumps(reports))
    with ExitStack() as last:
        last_step, faults = LAST.get(scenario, (-1, []))
        for fault in faults if done == last_step else []:
            last.enter_context(fault(self))
        return step(self)


def step_with_fault(loop: GRPOLoop, fault: Fault) -> str:
    """Run a step with a fault; return the error and how often the engine generated."""
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
    return "no error"


GRPOLoop.train_step = step_after_faults  # type: ignore[method-assign]
