"""Layers that quantize: their pieces are collected, proved to be in place, and quantized where kernels read them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from swift_megatron_grpo.weights.load import online_layers as module
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.online_layers import VllmOnlineLayer, online_layers
from tests.unit.generation.vllm.online_model import Experts, OnlineModel, Weights, fresh, held_memory, tensors
from tests.unit.loop.two_workers import Engine

GATE = "blocks.1.gate@2"
IN_8_BITS = ["qkv.weight", "o.weight", "gate_up.weight", "experts.w13_weight", "experts.w2_weight"]


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    return VllmConfig()


class QuantizedEngine(Engine):
    """An engine of two workers that has started with a checkpoint of other weights."""

    def __init__(self, vllm_config: VllmConfig, padding: int = 0, parallel: bool = False) -> None:
        super().__init__()
        self.padding, self.parallel = padding, parallel
        self.models = [fresh(tensors(seed=9), worker, padding, parallel) for worker in (0, 1)]  # type: ignore[misc]
        self.layers = [online_layers(model, vllm_config) for model in self.models]
        self.loaded = [
            LoadedWeights(model, torch.float32, "engine 0", layers)
            for model, layers in zip(self.models, self.layers, strict=True)
        ]
        self.addresses = self._addresses()

    def _addresses(self) -> list[dict[str, int]]:
        return [{name: value.data_ptr() for name, value in held_memory(model)} for model in self.models]

    def assert_holds(self, weights: Weights) -> None:
        """Check all memory bit for bit against a model that vLLM has loaded, and that no tensor has moved."""
        assert self._addresses() == self.addresses
        for worker, model in enumerate(self.models):
            expected = dict(held_memory(fresh(weights, worker, self.padding, self.parallel)))
            found = dict(held_memory(model))
            assert found.keys() == expected.keys()
            for name, value in found.items():
                assert value.dtype == expected[name].dtype and value.shape == expected[name].shape, name
                assert value.stride() == expected[name].stride(), name
                assert torch.equal(value.float(), expected[name].float()), name


def test_the_layers_that_quantize_are_found(vllm_config: VllmConfig) -> None:
    names = [name for layer in online_layers(fresh(tensors()), vllm_config) for name in layer.parameters]
    assert names == [f"blocks.{i}.{name}" for i in (0, 1) for name in IN_8_BITS]


def test_staging_tensors_are_those_of_the_checkpoint_with_zeros(vllm_config: VllmConfig) -> None:
    torch.full((2**16,), 7.0)  # leaves memory that is not zero
    layer = next(layer for layer in online_layers(fresh(tensors(), padding=2), vllm_config) if "experts" in layer.name)
    for name, tensor in layer.allocate().items():
        assert tensor.dtype == torch.bfloat16 and tensor.shape == ((3, 10, 16) if "w13" in name else (3, 16, 5))
        assert not tensor.any()


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("collect_checksums", [False, True])
def test_every_sync_leaves_what_vllm_itself_would_load(
    vllm_config: VllmConfig, padding: int, collect_checksums: bool
) -> None:
    engine = QuantizedEngine(vllm_config, padding)
    for seed in range(3):
        weights = tensors(seed)
        engine.load(weights, collect_checksums or seed == 0)
        engine.assert_holds(weights)
        if collect_checksums:
            assert engine.problems(weights) == (set(), set())


def test_an_unverified_run_is_traced_as_well(vllm_config: VllmConfig) -> None:
    engine = QuantizedEngine(vllm_config)
    for seed in range(2):
        engine.load(tensors(seed), collect_checksums=False)
        engine.assert_holds(tensors(seed))


def test_tensors_may_arrive_in_any_order_and_in_buckets(vllm_config: VllmConfig) -> None:
    engine, source = QuantizedEngine(vllm_config), random.Random(0)
    for seed in range(4):
        names = list(tensors())
        source.shuffle(names)
        weights = {name: tensors(seed)[name] for name in names}
        if seed % 2:
            engine.load_in_buckets(weights, 1024)
        else:
            engine.load(weights)
        engine.assert_holds(weights)
        assert engine.problems(weights) == (set(), set())


def test_workers_may_hold_different_experts(vllm_config: VllmConfig) -> None:
    """Loaders are called for the experts of others as well, also when all of a worker's own have arrived."""
    engine = QuantizedEngine(vllm_config, parallel=True)
    for seed in range(3):
        weights = tensors(seed)
        engine.load(weights)
        engine.assert_holds(weights)
        assert engine.problems(weights) == (set(), set())
    engine.load(weights | {GATE: weights["blocks.1.up@2"]})
    assert engine.problems(weights)[0] == {(GATE, "the engine holds other values than were sent")}


@pytest.mark.parametrize("parallel", [False, True])
def test_later_syncs_do_not_run_the_models_loaders(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    engine = QuantizedEngine(vllm_config, parallel=parallel)
    engine.load(tensors())

    def refuse(self: OnlineModel, weights: Iterable[Any]) -> set[str]:
        raise AssertionError("the model's loaders ran")

    monkeypatch.setattr(OnlineModel, "load_weights", refuse)
    engine.load(tensors(1))
    assert engine.problems(tensors(1)) == (set(), set())


def test_one_layer_at_a_time_has_staging_tensors(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = QuantizedEngine(vllm_config)
    events: list[str] = []

    def recorded(name: str, of_class: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: VllmOnlineLayer, *args: Any) -> Any:
            events.append(name)
            return of_class(self, *args)

        return run

    for name in ("allocate", "quantize"):
        monkeypatch.setattr(VllmOnlineLayer, name, recorded(name, getattr(VllmOnlineLayer, name)))
    for seed in range(2):
        engine.load(tensors(seed), collect_checksums=False)
        assert events == ["allocate", "quantize"] * 16
        events.clear()


def test_values_are_changed_from_sync_to_sync(vllm_config: VllmConfig) -> None:
    engine = QuantizedEngine(vllm_config)
    engine.load(tensors(0))
    before = {name: value.clone() for name, value in held_memory(engine.models[0]) if not name.endswith("strides")}
    engine.load(tensors(1))
    unchanged = [name for name, value in held_memory(engine.models[0])
                 if name in before and torch.equal(value.float(), before[name].float())]  # fmt: skip
    assert unchanged == []


def test_memory_that_was_discarded_in_sleep_is_written_anew(vllm_config: VllmConfig) -> None:
    """At level 2 memory keeps its address and loses its content, also that of a kernel's own tensors."""
    engine = QuantizedEngine(vllm_config)
    for seed in range(3):
        for model in engine.models:
            for _, value in held_memory(model):
                value.data.fill_(5)
        engine.load(tensors(seed), collect_checksums=False)
        engine.assert_holds(tensors(seed))


@pytest.mark.parametrize("traced", [True, False])
def test_a_wrong_tensor_is_found(vllm_config: VllmConfig, traced: bool) -> None:
    engine, weights = QuantizedEngine(vllm_config), tensors(1)
    if not traced:
        engine.load(tensors(0))
    engine.load(weights | {GATE: weights["blocks.1.up@2"], "blocks.0.k": weights["blocks.0.v"]})
    other = "the engine holds other values than were sent"
    assert engine.problems(weights) == ({(GATE, other), ("blocks.0.k", other)}, set())
    engine.load(weights)
    assert engine.problems(weights) == (set(), set())


@pytest.mark.parametrize("traced", [True, False])
def test_a_tensor_left_out_is_found(vllm_config: VllmConfig, traced: bool) -> None:
    engine, weights = QuantizedEngine(vllm_config), tensors(1)
    if not traced:
        engine.load(tensors(0))
    sent = {name: value for name, value in weights.items() if name != GATE}
    engine.load(sent)
    problems, _ = engine.problems(weights)
    never = "parameters of the engine that no sent tensor writes"
    assert ("blocks.1.experts.w13_weight", never) in problems
    with pytest.raises(RuntimeError, match=r"not all weights .* have arrived: blocks\.1\.experts\.w13_weight"):
        engine.load(sent, collect_checksums=False)
    engine.load(weights)
    engine.assert_holds(weights)


def test_a_tensor_that_arrives_twice_is_an_error(vllm_config: VllmConfig) -> None:
    engine = QuantizedEngine(vllm_config)
    engine.load(tensors(0))
    [loaded, _] = engine.loaded
    twice = [*tensors(1).items(), ("blocks.0.o", tensors(1)["blocks.0.o"])]
    with pytest.raises(RuntimeError, match=r"blocks\.0\.o have arrived after all its weights had"):
        loaded.load(iter(twice), lambda: None, collect_checksums=False)


def test_a_layer_that_is_loaded_twice_is_an_error(vllm_config: VllmConfig) -> None:
    engine = QuantizedEngine(vllm_config)
    twice = [*tensors(1).items(), ("blocks.0.o", tensors(1)["blocks.0.o"])]
    with pytest.raises(RuntimeError, match="loads weights of a layer again after all have arrived"):
        engine.loaded[0].load(iter(twice), lambda: None, collect_checksums=True)


def test_weights_that_are_computed_are_refused(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(
        self: Experts, param: Any, loaded_weight: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        load(self, param, -loaded_weight, name, shard_id, expert_id)

    load = Experts.load
    monkeypatch.setattr(Experts, "load", negated)
    engine = QuantizedEngine(vllm_config)
    parameters = dict(engine.models[0].named_parameters())
    with pytest.raises(
        RuntimeError, match=r"vLLM computes blocks\.0\.experts\.w13_weight.*use --rollout_quantization none"
    ):
        engine.load(tensors())
    found = dict(engine.models[0].named_parameters())
    assert all(found[name] is value for name, value in parameters.items())  # put back


def test_weights_in_8_bits_that_nothing_quantizes_are_refused(vllm_config: VllmConfig) -> None:
    model = fresh(tensors())
    model.extra = torch.nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(RuntimeError, match="vLLM holds extra in 8 bits"):
        online_layers(model, vllm_config)


def test_results_of_another_shape_are_refused(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = QuantizedEngine(vllm_config)
    method = type(engine.models[0].blocks[0].o.quant_method)
    process = method.process_weights_after_loading

    def cut(self: Any, layer: Any) -> None:
        process(self, layer)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale[:-1], requires_grad=False)

    monkeypatch.setattr(method, "process_weights_after_loading", cut)
    with pytest.raises(RuntimeError, match=r"quantized blocks\.0\.qkv\.weight_scale to .*\(11, 1\).*read .*\(12, 1\)"):
        engine.load(tensors())


def test_a_kernels_own_scratch_memory_is_left_alone() -> None:
    strides = torch.arange(3)
    first: dict[str, Any] = {"strides": strides, "scratch": torch.zeros(4), "other": torch.zeros(2)}
    module._copy_derived({"strides": strides + 1, "scratch": None, "other": torch.ones(3)}, first, set())
    assert strides.tolist() == [1, 2, 3] and first["scratch"].sum() == 0 and first["other"].sum() == 0
