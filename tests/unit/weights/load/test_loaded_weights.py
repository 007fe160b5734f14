"""After a traced load, weights are copied to their places, and the model loads what more than a copy is needed for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swift_megatron_grpo.weights.load import loaded_weights
from swift_megatron_grpo.weights.load.load_tracer import LoadTrace
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from tests.unit.loop.two_workers import Engine, Model, tensors


class Recorded(Model):
    """Records the names that reach its load_weights."""

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.names: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        listed = list(weights)
        self.names = [name for name, _ in listed]
        return super().load_weights(iter(listed))


def recorded_engine(finish: Any = lambda model: None) -> tuple[Engine, list[Recorded]]:
    """Return an engine that has loaded weights once, and its models."""
    engine, models = Engine(finish), [Recorded(0), Recorded(1)]
    engine.models = list(models)
    engine.loaded = [LoadedWeights(model, torch.float32, "engine 0") for model in models]
    engine.load(tensors())
    assert all(set(model.names) == set(tensors()) for model in models)
    return engine, models


@pytest.mark.parametrize("collect_checksums", [False, True])
@pytest.mark.parametrize("batch", [1, 2**28])
def test_after_a_trace_the_model_loads_only_what_it_pads(
    collect_checksums: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_weights, "BATCH_BYTES", batch)
    (engine, models), expected, weights = recorded_engine(), Engine(), tensors()
    for model in models:  # as after vLLM has slept without its weights
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
    engine.load(weights, collect_checksums)
    expected.load(weights)
    assert [model.names for model in models] == [["embedding"]] * 2
    for model, other in zip(models, expected.models, strict=True):
        for name in ("qk", "o", "norm", "embedding"):
            assert torch.equal(getattr(model, name), getattr(other, name)), name
        assert torch.equal(model.experts[:, :4], other.experts[:, :4])
    assert engine.problems(weights) == (set(), set())


def test_weights_of_another_type_are_converted() -> None:
    engine, [model, _] = recorded_engine()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}
    engine.load(weights, collect_checksums=False)
    assert torch.equal(model.norm, weights["norm"].float())


def test_the_model_loads_what_it_rearranges() -> None:
    def negate(model: Any) -> None:
        model.o.data.neg_()

    (engine, models), weights = recorded_engine(negate), tensors()
    engine.load(weights)
    assert [sorted(model.names) for model in models] == [["embedding", "o"]] * 2
    assert torch.equal(models[0].o, -weights["o"][:, :4])


def test_the_model_loads_into_parameters_that_were_replaced() -> None:
    (engine, models), weights = recorded_engine(), tensors()
    for model in models:
        model.norm = torch.nn.Parameter(torch.zeros(16)[:8])  # in a larger storage
    engine.load(weights, collect_checksums=False)
    assert [sorted(model.names) for model in models] == [["embedding", "norm"]] * 2
    assert torch.equal(models[0].norm, weights["norm"])


def test_a_tensor_in_the_memory_of_a_freed_one_is_not_that_one() -> None:
    """vLLM transposes the experts of a GPT-OSS one layer after the other, in the same memory."""
    memory = bytearray(64)  # stands for an allocator that gives freed memory out again

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.frombuffer(memory, dtype=torch.float32)

    model = torch.nn.Linear(4, 4, bias=False)
    with LoadTrace(model) as trace:
        assert [name for name, _ in trace.register(sent())] == ["first"]
        model.weight.data.copy_(torch.frombuffer(memory, dtype=torch.float32).view(4, 4))
    trace.close(None)
    assert trace.computed == {"weight"} and not trace.copies and not trace.ignored


def test_a_loaded_buffer_is_read_back() -> None:
    """A model of transformers that vLLM runs has the bias of a router in a buffer."""

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))
            self.register_buffer("bias", torch.zeros(4))

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    router, sent = Router(), {"weight": torch.ones(4), "bias": torch.full((4,), 2.0)}
    loaded = LoadedWeights(router, torch.float32, "engine 0")
    for factor in (1, 2):  # by the model, then directly
        loaded.load([(name, factor * tensor) for name, tensor in sent.items()], lambda: None, collect_checksums=True)
        held = loaded.worker_weights()
        assert held.held.keys() == sent.keys() and not held.ignored
        assert torch.equal(router.bias, factor * sent["bias"])


def test_a_tensor_that_the_traced_load_did_not_have_is_an_error() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.Parameter(torch.zeros(8))

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            self.norm.data.copy_(dict(weights)["norm"])
            return {"norm"}

    model = Norm()
    loaded = LoadedWeights(model, torch.float32, "engine 0")
    loaded.load(iter({"norm": torch.ones(8)}.items()), lambda: None, collect_checksums=True)
    with pytest.raises(RuntimeError, match="lm_head has arrived"):
        loaded.load(iter({"norm": torch.ones(8), "lm_head": torch.ones(8)}.items()), lambda: None, False)
