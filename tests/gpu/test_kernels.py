"""The kernels that `--fast_kernels` chooses, against Megatron's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_two_steps_are_those_of_megatrons_kernels(gpus: Gpus) -> None:
    fast, plain = (
        json.loads((gpus.folder / folder / "one.json").read_text()) for folder in ("dense-full", "plain-kernels")
    )
    for mine, theirs in zip(fast["metrics"], plain["metrics"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.005)
    ours, others = torch.load(Path(fast["weights"])), torch.load(Path(plain["weights"]))
    moved = max((ours[name] - others[name]).abs().max().item() for name in others)
    assert moved < 3e-3  # two steps of 1e-3 at most


@pytest.mark.parametrize("width", [128, 512])
def test_a_norm_and_its_gradients(width: int) -> None:
    import transformer_engine.pytorch as te

    from swift_megatron_grpo.training.kernels import _rms_norm

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
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_swiglu_and_its_gradient() -> None:
    from swift_megatron_grpo.training.kernels import _swiglu

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
