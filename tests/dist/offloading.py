"""For two ranks: the same steps with everything that may leave leaving, and with nothing leaving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.config import LossConfig, ResidencyConfig
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.tools.check_layouts import fixed_samples, megatron_torn_down
from swift_megatron_grpo.training.loss import make_loss
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights.export import export_weights

STEPS = 3
EVERYTHING = ResidencyConfig(offload_model=True, offload_optimizer=True, offload_grad=True)
NOTHING = ResidencyConfig(offload_model=False, offload_optimizer=False, offload_grad=False)


def main(out: str, flags: list[str]) -> None:
    stays = Run(flags, NOTHING)
    expected = [stays.step(seed) for seed in range(STEPS)]
    with megatron_torn_down():
        del stays
    moves = Run(flags, EVERYTHING)
    seen = [moves.step(seed) for seed in range(STEPS)]
    told: dict[str, Any] = {
        "groups": {name: group.nbytes() for name, group in moves.residency.groups.items()},
        "metrics_equal": [a.metrics == b.metrics for a, b in zip(seen, expected, strict=True)],
        "trained": all(each.metrics["grad_norm"] > 0 for each in seen),
        "weights_differ": sorted({n for a, b in zip(seen, expected, strict=True) for n in differing(a, b)}),
        "moved_by_training": len(differing(seen[0], seen[-1])),
        "left": [each.left for each in seen],
        "stayed": [each.left for each in expected],
        "decisions": moves.decisions,
    }
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(told))


@dataclass
class Step:
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]  # as a weight sync would have sent them
    left: dict[str, dict[str, int]]  # phase -> bytes that tensors of each kind still had


def differing(one: Step, other: Step) -> list[str]:
    assert set(one.weights) == set(other.weights)
    return [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]


def _frozen_models(trainer: Any) -> list[Any]:
    return [] if trainer.frozen_reference is None else trainer.frozen_reference.models


class Run:
    """On a GPU that has room for either vLLM or the trained state."""

    def __init__(self, flags: list[str], config: ResidencyConfig) -> None:
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF

        self.trainer = MegatronRLHF(flags).prepare_trainer()
        self.trainer.setup_model_training()
        self.engine = self.trainer.build_engine()
        self.reference = self.trainer.build_reference(self.engine, Coordinator(timedelta(minutes=5)))
        self.loss = make_loss(LossConfig(name="grpo", epsilon_low=0.2, epsilon_high=0.28, beta=0.1, temperature=0.9))
        self.decisions: list[str] = []
        trainer = self.trainer
        self.residency = Residency(
            config,
            trainer.wrapped_models,
            _frozen_models(trainer),
            trainer.optimizer,
            log=self.decisions.append,
            free_memory=self.bytes_away,
        )

    def bytes_away(self) -> int:
        return sum(group.nbytes() for group in self.residency.groups.values() if group.is_offloaded)

    def step(self, seed: int) -> Step:
        """As loop.py goes through the phases, the old log-probs computed as well."""
        residency, reference, left = self.residency, self.reference, {}
        samples = fixed_samples(self.trainer.config.padded_vocab_size, 8, seed)
        residency.make_room(sum(group.nbytes() for group in residency.groups.values()))
        left["room made"] = self.bytes_of_tensors()
        residency.for_weight_sync()
        weights = {n: t.clone() for n, t in export_weights(self.trainer.bridge, self.trainer.unwrapped_models)}
        residency.for_generation()
        left["generation"] = self.bytes_of_tensors()
        self.scribble()
        residency.for_inference()
        for index, values in self.engine.infer(samples).items():
            samples[index].old_logprobs = values.logprobs
        left["inference"] = self.bytes_of_tensors()
        residency.for_reference()
        for index, values in reference.infer(samples).items():
            samples[index].ref_logprobs = values.logprobs
        left["reference"] = self.bytes_of_tensors()
        residency.for_training()
        metrics = self.engine.train_step(samples, self.loss)
        left["training"] = self.bytes_of_tensors()
        residency.restore()
        return Step(metrics, weights, left)

    def scribble(self) -> None:
        """vLLM writes over the memory that was left; without this an allocator may hand it back as it was."""
        device = torch.cuda.current_device()
        tensors = [tensor for those in self.tensors().values() for tensor in those]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        sizes += [group.nbytes() for group in self.residency.groups.values()]
        for size in sizes:
            torch.full((size,), 255, dtype=torch.uint8, device=device)

    def bytes_of_tensors(self) -> dict[str, int]:
        """What the program's own tensors hold on to, whatever Residency says."""
        return {kind: sum(t.untyped_storage().nbytes() for t in those) for kind, those in self.tensors().items()}

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
    """States and fp32 weights, by Megatron's own names."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        for group in part.shard_fp32_from_float16_groups:
            yield from (weight for weight in group if weight is not None)
