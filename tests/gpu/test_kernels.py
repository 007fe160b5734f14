"""The kernels that `--fast_kernels` selects, against Megatron's own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.training.layers.attention_check import poison_free_memory
from tests.gpu.conftest import Gpus, needs_cuda

pytestmark = pytest.mark.gpu


def test_two_steps_match_those_with_megatrons_kernels(gpus: Gpus) -> None:
    fast, plain = (
        json.loads((gpus.folder / folder / "one.json").read_text()) for folder in ("dense-full", "plain-kernels")
    )
    for step, expected in zip(fast["metrics"], plain["metrics"], strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
        assert step["loss"] == pytest.approx(expected["loss"], abs=0.005)
    weights, expected_weights = torch.load(Path(fast["weights"])), torch.load(Path(plain["weights"]))
    difference = max((weights[name] - expected_weights[name]).abs().max().item() for name in expected_weights)
    assert difference < 3e-3  # two steps of 1e-3 at most


@needs_cuda
def test_recomputing_activations_changes_nothing(gpus: Gpus) -> None:
    """Dense layers: a norm before attention, a norm and SwiGLU in the MLP; forward and backward of two steps."""
    folder = gpus.folder / "recompute-elementwise"
    assert json.loads((folder / "one.calls.json").read_text()) >= 2 * 3 * 4  # steps, places, layers
    recomputed, expected = (
        json.loads((path / "one.json").read_text())["metrics"] for path in (folder, gpus.folder / "dense-full")
    )
    assert [step["loss"] for step in recomputed] == [step["loss"] for step in expected]
    for step, expected_step in zip(recomputed, expected, strict=True):
        # attention adds up in any order
        assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-4)


@needs_cuda
def test_a_recomputing_mlp_keeps_less_memory_and_has_the_same_gradients() -> None:
    import transformer_engine.pytorch as te

    from swift_megatron_grpo.training.layers import fast_kernels as kernels

    class First(te.LayerNormLinear):  # returns the bias separately, as Megatron's classes do
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None

    class Second(te.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None

    torch.manual_seed(0)
    tokens, width = kernels.MIN_TOKENS_TO_RECOMPUTE, 512
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    first, second = First(width, 4 * width, normalization="RMSNorm", **options), Second(2 * width, width, **options)
    first.layer_norm_weight.data.normal_(1, 0.2)
    x = torch.randn(tokens, 1, width, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn_like(x)
    swiglu = kernels._swiglu()

    def run(recompute: bool) -> tuple[list[torch.Tensor], int]:
        first_forward, second_forward = first.forward, second.forward
        if recompute:
            first_forward = partial(kernels._norm_recomputed_in_backward, first, first_forward)
            second_forward = partial(kernels._swiglu_recomputed_in_backward, second_forward)
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
        leaf = x.clone().requires_grad_()
        before = torch.cuda.memory_allocated()
        gate_and_up, _ = first_forward(leaf)
        inner = swiglu.apply(gate_and_up.view(-1, 4 * width), False, False).view(tokens, 1, 2 * width)
        out, _ = second_forward(inner)
        del gate_and_up, inner
        kept = torch.cuda.memory_allocated() - before
        out.backward(upstream)
        grads = [leaf.grad, first.weight.grad, first.layer_norm_weight.grad, second.weight.grad]
        return [grad.clone() for grad in grads if grad is not None], kept

    run(recompute=False)  # allocates workspaces
    expected, kept_without = run(recompute=False)
    gradients, kept_with = run(recompute=True)
    assert len(gradients) == 4
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)
    saved = tokens * (width + 2 * width) * 2  # outputs of the norm and of SwiGLU, in bf16
    assert abs(kept_without - kept_with - saved) < saved / 20


@needs_cuda
@pytest.mark.parametrize("width", [128, 512])
def test_the_norm_and_its_gradients_match_transformer_engine(width: int) -> None:
    import transformer_engine.pytorch as te

    from swift_megatron_grpo.training.layers.fast_kernels import _rms_norm

    torch.manual_seed(0)
    module = te.RMSNorm(width, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    module.weight.data.normal_(1, 0.2)
    x = torch.randn(300, 1, 4, width, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn_like(x)
    results = []
    for function in (module, lambda x: _rms_norm(module, module.forward, x)):
        leaf = x.clone().requires_grad_()
        module.weight.grad = None
        out = function(leaf)
        out.backward(upstream)
        results.append((out.detach(), leaf.grad, module.weight.grad.clone()))
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


@needs_cuda
def test_swiglu_and_its_gradient_match_fp64() -> None:
    from swift_megatron_grpo.training.layers.fast_kernels import _swiglu

    torch.manual_seed(0)
    x = torch.randn(100, 1, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(100, 1, 256, device="cuda", dtype=torch.bfloat16)
    out = _swiglu().apply(x, False, False)
    out.backward(upstream)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-2, atol=1e-2)


@needs_cuda
def test_swiglu_of_experts_and_its_gradients_match_fp64_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.fusions import fused_bias_swiglu

    from tests.unit.training.weighted_swiglu_cases import (
        CASES,
        Case,
        check,
        check_against_megatron,
        check_nan,
        megatrons,
    )

    monkeypatch.setattr(fused_bias_swiglu, "WeightedSwiGLUFunction", fused_bias_swiglu.WeightedSwiGLUFunction)
    own, replaced = megatrons()  # which change the class

    def on_poisoned_memory(gate_and_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        poison_free_memory(gate_and_up.device)
        out = replaced(gate_and_up, weights)
        poison_free_memory(gate_and_up.device)
        return out

    for case in (*CASES, Case("a micro batch", 65_536 + 3, 768), Case("wide", 1_000, 14_336)):
        check(case, "cuda", on_poisoned_memory)
    check_nan("cuda", on_poisoned_memory)
    check_against_megatron("cuda", own, on_poisoned_memory)


@needs_cuda
def test_swiglu_of_experts_has_the_same_bits_every_time() -> None:
    from swift_megatron_grpo.training.moe.weighted_swiglu import WeightedSwiGLU

    torch.manual_seed(0)
    gate_and_up = torch.randn(65_536, 1_536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(65_536, 1, device="cuda", requires_grad=True)
    upstream = torch.randn(65_536, 768, device="cuda", dtype=torch.bfloat16)
    results = []
    for _ in range(3):
        out = WeightedSwiGLU.apply(gate_and_up, weights, False)
        results.append((out, *torch.autograd.grad(out, (gate_and_up, weights), upstream)))
    for other in results[1:]:
        assert all(torch.equal(value, first) for value, first in zip(other, results[0], strict=True))
