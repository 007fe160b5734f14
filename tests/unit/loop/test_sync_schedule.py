"""A weight sync compares checksums and sometimes scores log-probs, and catches a fault in the sync that has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from swift_megatron_grpo.generation.interface import NamedWeights
from swift_megatron_grpo.loop.step_context import PhaseTimer
from swift_megatron_grpo.loop.weight_sync import EngineHasOtherWeights, WeightSync
from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.types import ScoredText
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights
from tests.fakes.ranks import OneRank
from tests.unit.loop.two_workers import Engine, Model, tensors
from tests.unit.settings.flags import of

Weights = Mapping[str, torch.Tensor]
TOKENS = 6


def logprobs(norm: torch.Tensor) -> list[float]:
    return (-norm[:TOKENS].double().abs()).tolist()


class Trainer:
    """Takes the place of export, canary and residency: weights, and log-probs that follow from one of them."""

    adapter: Any = None
    adapted_count = 0
    text, tokens = ScoredText([1]), list(range(TOKENS + 1))

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.change: Callable[[Weights], Weights] = lambda weights: weights  # in the export
        self.scored = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.change(self.weights).items())

    def pop_merged_count(self) -> int:
        return 0

    def logprobs(self) -> list[list[float]]:
        self.scored += 1
        return [logprobs(self.weights["norm"])]

    def compared(self, values: list[float]) -> list[float]:
        return values

    def make_room(self, needed: int) -> None: ...

    def for_weight_sync(self) -> None: ...

    def for_generation(self, needed: int) -> None: ...


class TwoWorkers:
    """An engine of two workers; `change` applies to what they receive in the next `changed` transfers."""

    memory_to_wake = 0
    lacks_base = False

    def __init__(self) -> None:
        self.engine = Engine()
        self.version = -1
        self.change: Callable[[Weights], Weights] = lambda weights: weights
        self.changed = 0
        self.collected: list[bool] = []
        self.verified: list[int] = []
        self.lost_when_read = False

    def restart(self, model: type[Model] = Model) -> None:
        self.engine.models = [model(0), model(1)]
        self.engine.loaded = [LoadedWeights(model, torch.float32, "engine 0") for model in self.engine.models]
        self.version = -1

    @property
    def is_new(self) -> bool:
        return any(loaded.is_new for loaded in self.engine.loaded)

    def needs_weights(self, version: int) -> bool:
        return self.version != version

    def mark_verified(self) -> None:
        self.verified.append(self.version)

    def invalidate_weights(self) -> None:
        self.version = -1

    def load_weights(self, weights: NamedWeights, version: int, adapter: Any, collect_checksums: bool) -> None:
        sent = dict(weights)
        self.collected.append(collect_checksums)
        if self.changed:
            self.changed -= 1
            sent = dict(self.change(sent))
        if adapter is None:
            self.engine.load(sent, collect_checksums)
        self.version = version

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        return lambda: {"engine 0": logprobs(self.engine.models[0].norm.data)}

    def held_weights(self) -> list[WorkerWeights]:
        if self.lost_when_read:
            self.lost_when_read = False
            self.restart()
            return []
        return [loaded.worker_weights() for loaded in self.engine.loaded]

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...


class Run:
    """A run whose weights change in every step."""

    def __init__(self, adapter: Any = None, **flags: Any) -> None:
        self.trainer, self.workers, self.version = Trainer(), TwoWorkers(), -1
        self.trainer.adapter = adapter
        config: Any = of(Adapter, torch_dtype=torch.float32, **flags)
        log = logging.getLogger(__name__)
        stages: list[Any] = [self.workers, self.trainer, self.trainer, self.trainer, OneRank()]
        self.sync = WeightSync(config, *stages, log)

    def step(self) -> bool:
        """Train and sync. Return whether log-probs were scored."""
        self.version += 1
        self.trainer.weights = tensors()
        return self.sync_again()

    def sync_again(self) -> bool:
        before = self.trainer.scored
        metrics = self.sync.to_engine(self.version, PhaseTimer())
        assert self.workers.verified[-1] == self.version
        assert bool(metrics) == (self.trainer.scored > before)
        return bool(metrics)

    def steps(self, number: int) -> list[int]:
        """Return which of the next steps were scored."""
        return [index for index in range(number) if self.step()]


def test_log_probs_are_scored_first_and_rarely_and_checksums_always() -> None:
    run = Run()
    assert run.steps(40) == [0, 1, 2, 16, 32]
    assert run.workers.collected == [True] * 40


def test_full_scores_in_every_sync_and_off_in_none() -> None:
    assert Run(sync_check="full").steps(20) == list(range(20))
    run = Run(sync_check="off")
    assert run.steps(5) == [] and run.workers.collected == [False] * 5


def test_a_new_engine_is_scored_as_the_first_one() -> None:
    run = Run()
    run.steps(8)
    run.workers.restart()
    assert run.sync_again()
    assert run.steps(20) == [0, 1, 15]


class Computed(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        super().load_weights(weights)
        self.o.data.mul_(2)
        return set()


def test_what_cannot_be_compared_is_scored_in_every_sync() -> None:
    run = Run()
    run.workers.restart(Computed)
    assert run.steps(20) == list(range(20))
    assert run.workers.collected == [True] + [False] * 19
    run = Run(rollout_quantization="fp8")
    assert run.steps(20) == list(range(20))
    run = Run(adapter={"r": 8})
    run.workers.restart(Computed)
    run.trainer.logprobs = lambda: [logprobs(run.workers.engine.models[0].norm.data)]  # type: ignore[method-assign]
    for _ in range(20):
        run.version += 1
        run.trainer.weights = tensors()
        assert run.sync.to_engine(run.version, PhaseTimer())
    assert run.workers.collected == [False] * 20


def wrong(weights: Weights) -> Weights:
    changed = weights["expert.1"].clone()
    changed.view(torch.int32)[3, 5] ^= 1  # the last bit
    return {**weights, "expert.1": changed}


def swapped(weights: Weights) -> Weights:
    return {**weights, "expert.0": weights["expert.1"], "expert.1": weights["expert.0"]}


def stale(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != "expert.1"}


@pytest.mark.parametrize("fault", [wrong, swapped, stale])
def test_a_fault_of_one_transfer_is_caught_in_the_sync_that_has_it(fault: Callable[[Weights], Weights]) -> None:
    run = Run()
    run.steps(6)  # log-probs are not scored any more
    run.workers.change, run.workers.changed = fault, 1
    assert run.step(), "the sync is repeated, and scored"
    assert run.workers.verified == list(range(7)) and len(run.workers.collected) == 8
    assert run.steps(20) == [0, 1, 15], "as after a new engine"
    run.workers.changed = 2
    with pytest.raises(EngineHasOtherWeights, match=r"the engine holds other values than were sent: .*expert\.1"):
        run.step()
    assert run.workers.verified[-1] == run.version - 1


def test_an_export_of_other_weights_is_caught_in_the_next_scored_sync() -> None:
    run = Run()
    run.steps(14)
    run.trainer.change = lambda weights: {**weights, "norm": weights["norm"] + 1}
    assert run.steps(2) == [], "the engine holds what was exported"
    with pytest.raises(EngineHasOtherWeights, match="So the export itself is wrong"):
        run.step()


def test_engines_that_are_lost_before_they_answer_are_not_verified() -> None:
    run = Run()
    run.steps(6)
    run.workers.lost_when_read = True
    assert run.step(), "the weights are sent to the new engine, and its log-probs scored"
    assert len(run.workers.collected) == 8
