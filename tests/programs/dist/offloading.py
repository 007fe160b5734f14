"""Run the same steps with everything offloaded that can be, and with nothing offloaded, on two ranks.

The last steps have room for the engine until their weight sync takes it, so they offload more after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples, megatron_torn_down
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.settings.trained import Offloading
from swift_megatron_grpo.training.loss import make_loss
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights.export.export import export_weights
from tests.programs.dist.engine_runs import make_reference

STEPS, SHORT_STEPS = 3, 2
EVERYTHING = Offloading(offload_model=True, offload_optimizer=True, offload_grad=True)
NOTHING = Offloading(offload_model=False, offload_optimizer=False, offload_grad=False)


def main(out: str, flags: list[str]) -> None:
    resident = Run(flags, NOTHING)
    expected = resident.steps()
    with megatron_torn_down():
        del resident
    offloading = Run(flags, EVERYTHING)
    actual = offloading.steps()
    usual, short = actual[:STEPS], actual[STEPS:]
    report: dict[str, Any] = {
        "groups": {name: group.nbytes() for name, group in offloading.residency.groups.items()},
        "metrics_equal": [a.metrics == b.metrics for a, b in zip(actual, expected, strict=True)],
        "trained": all(step.metrics["grad_norm"] > 0 for step in actual),
        "weights_differ": sorted({n for a, b in zip(actual, expected, strict=True) for n in differing(a, b)}),
        "moved_by_training": len(differing(actual[0], actual[-1])),
        "resident_with_offloading": [step.resident for step in usual],
        "resident_without": [step.resident for step in expected],
        "decisions": [decision for step in usual for decision in step.decisions],
        "short_after_the_sync": [step.offloaded for step in short],
        "decisions_of_short_memory": [decision for step in short for decision in step.decisions],
    }
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


@dataclass
class Step:
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]  # as a weight sync would send them
    resident: dict[str, dict[str, int]]  # phase -> bytes on the device, by kind of tensor
    offloaded: list[list[str]]  # groups, in the weight sync and in generation
    decisions: list[str]


def differing(one: Step, other: Step) -> list[str]:
    assert set(one.weights) == set(other.weights)
    return [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]


def _frozen_models(trainer: Any) -> list[Any]:
    return [] if trainer.frozen_reference is None else trainer.frozen_reference.passes.models


class Run:
    """A trainer on a simulated GPU that has room for either vLLM or the trained state."""

    def __init__(self, flags: list[str], config: Offloading) -> None:
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF

        self.trainer = MegatronRLHF(flags).prepare_trainer()
        self.trainer.setup_model_training()
        self.engine = self.trainer.build_engine()
        self.reference = make_reference(self.trainer, self.engine)
        self.loss = make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1))
        self.decisions: list[str] = []
        self.spare = 0  # bytes of the GPU that are free while nothing is offloaded
        trainer = self.trainer
        self.residency = Residency(
            config,
            trainer.loaded_models().trained,
            _frozen_models(trainer),
            trainer.optimizer,
            log=self.decisions.append,
            free_memory=self.free_bytes,
        )

    def free_bytes(self) -> int:
        return self.spare + sum(self.residency.groups[name].nbytes() for name in self.offloaded())

    def offloaded(self) -> list[str]:
        return [name for name, group in self.residency.groups.items() if group.is_offloaded]

    def steps(self) -> list[Step]:
        return [self.step(seed, sync_takes_memory=seed >= STEPS) for seed in range(STEPS + SHORT_STEPS)]

    def step(self, seed: int, sync_takes_memory: bool = False) -> Step:
        """Run the phases of a step in the order of the loop, including the old log-probs.

        The engine needs as much as everything takes, or one byte more than is free after the sync.
        """
        residency, reference, resident, logged = self.residency, self.reference, {}, len(self.decisions)
        samples = fixed_samples(self.trainer.config.padded_vocab_size, 8, seed)
        needed = sum(group.nbytes() for group in residency.groups.values())
        if sync_takes_memory:
            needed, self.spare = self.free_bytes() + 1, 1
        residency.make_room(needed)
        resident["room made"] = self.resident_bytes()
        residency.for_weight_sync()
        weights = {n: t.clone() for n, t in export_weights(self.trainer.bridge, self.trainer.unwrapped_models)}
        offloaded, self.spare = [self.offloaded()], 0
        residency.for_generation(needed)
        offloaded.append(self.offloaded())
        resident["generation"] = self.resident_bytes()
        self.overwrite_freed_memory()
        residency.for_inference()
        for index, values in self.engine.infer(samples).items():
            samples[index].old_logprobs = values.logprobs
        resident["inference"] = self.resident_bytes()
        residency.for_reference()
        for index, values in reference.infer(samples).items():
            samples[index].ref_logprobs = values.logprobs
        resident["reference"] = self.resident_bytes()
        residency.for_training()
        metrics = self.engine.train_step(samples, self.loss)
        resident["training"] = self.resident_bytes()
        residency.restore()
        return Step(metrics, weights, resident, offloaded, self.decisions[logged:])

    def overwrite_freed_memory(self) -> None:
        """Overwrite freed memory, as vLLM would; otherwise an allocator may return it unchanged."""
        device = torch.cuda.current_device()
        tensors = [tensor for group in self.tensors().values() for tensor in group]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        sizes += [group.nbytes() for group in self.residency.groups.values()]
        for size in sizes:
            torch.full((size,), 255, dtype=torch.uint8, device=device)

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes that the tensors still occupy, by kind, independent of what Residency reports."""
        return {kind: sum(t.untyped_storage().nbytes() for t in tensors) for kind, tensors in self.tensors().items()}

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return {
            "policy": [*self.trainer.unwrapped_models[0].parameters(), *self.trainer.unwrapped_models[0].buffers()],
            "reference": [p for model in _frozen_models(self.trainer) for p in model.parameters()],
            "gradients": [
                parameter.main_grad
                for parameter in self.trainer.unwrapped_models[0].parameters()
                if parameter.requires_grad
            ],
            "optimizer": list(optimizer_tensors(self.trainer.optimizer)),
        }


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield states and fp32 weights of the optimizer, read from Megatron's attributes."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        held = vars(part)  # of the distributed optimizer, or of the plain one for 16 bits
        name = "shard_fp32_from_float16_groups"
        for group in held[name] if name in held else held["fp32_from_float16_groups"]:
            yield from (weight for weight in group if weight is not None)
