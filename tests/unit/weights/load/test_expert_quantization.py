"""vLLM's own method quantizes all experts of a layer in one call, to what it makes of one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.utils import replace_parameter

from swift_megatron_grpo.weights.load.online_layers import process_loaded
from tests.unit.generation.vllm.online_model import quantized

EXPERTS, HIDDEN, FFN = 5, 16, 6
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")


class Method(fp8.Fp8PtpcOnlineMoEMethod):
    """vLLM's method, which cannot make its kernel on a CPU."""

    def __init__(self) -> None:
        self.moe = SimpleNamespace(tp_size=1)

    def _setup_kernel(self, layer: Any, *tensors: torch.Tensor, **inputs: Any) -> None:
        assert layer.local_num_experts == EXPERTS and layer.w13_weight.shape == (EXPERTS, 2 * FFN, HIDDEN)
        assert inputs == {"w13_input_scale": None, "w2_input_scale": None}
        for name, tensor in zip(NAMES, tensors, strict=True):
            replace_parameter(layer, name, tensor)


def loaded_layer() -> Any:
    layer: Any = torch.nn.Module()
    torch.manual_seed(0)
    for name, shape in (("w13_weight", (EXPERTS, 2 * FFN, HIDDEN)), ("w2_weight", (EXPERTS, HIDDEN, FFN))):
        layer.register_parameter(name, torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), False))
    layer.local_num_experts, layer.quant_method = EXPERTS, Method()
    return layer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of vLLM's quantization of rows, which vLLM's build for CPUs lacks."""
    rows: list[int] = []

    def scaled_fp8_quant(weight: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert settings == {"scale": None, "use_per_token_if_dynamic": True}
        rows.append(len(weight))
        return quantized(weight)

    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", scaled_fp8_quant)
    return rows


def test_all_experts_at_once_give_the_bits_of_one_after_the_other(calls: list[int]) -> None:
    expected, found = loaded_layer(), loaded_layer()
    expected.quant_method.process_weights_after_loading(expected)
    one_by_one = calls.count(2 * FFN)
    calls.clear()
    process_loaded(found)
    assert one_by_one == EXPERTS and calls[0] == EXPERTS * 2 * FFN and calls.count(2 * FFN) == 0
    assert found.w13_weight.dtype == torch.float8_e4m3fn and found.w2_weight_scale.shape == (EXPERTS, HIDDEN, 1)
    for name in NAMES:
        theirs, ours = getattr(expected, name), getattr(found, name)
        assert theirs.shape == ours.shape and torch.equal(theirs.float(), ours.float()), name
    assert found.local_num_experts == EXPERTS and "_setup_kernel" not in vars(found.quant_method)


def test_other_methods_run_as_they_are() -> None:
    ran: list[Any] = []
    layer = SimpleNamespace(quant_method=SimpleNamespace(process_weights_after_loading=ran.append))
    process_loaded(layer)
    assert ran == [layer]
