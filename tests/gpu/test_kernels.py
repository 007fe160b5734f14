"""The kernels that `--fast_kernels` chooses, against Megatron's own."""

from __future__ import annotations

import json
from functools import partial
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


def test_making_activations_again_changes_nothing(gpus: Gpus) -> None:
    """Dense layers: a norm before attention, a norm and SwiGLU in the MLP; forward and backward of two steps."""
    folder = gpus.folder / "recompute-elementwise"
    assert json.loads((folder / "one.calls.json").read_text()) >= 2 * 3 * 4  # steps, places, layers
    found, expected = (json.loads((each / "one.json").read_text()) for each in (folder, gpus.folder / "dense-full"))
    assert [step["loss"] for step in found["metrics"]] == [step["loss"] for step in expected["metrics"]]
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)  # attention adds up in any order


def test_an_mlp_that_forgets_is_smaller_and_has_the_same_gradients() -> None:
    import transformer_engine.pytorch as te

    from swift_megatron_grpo.training import fast_kernels as kernels

    class First(te.LayerNormLinear):  # as megatron's classes do, they return a bias beside
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None

    class Second(te.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None

    torch.manual_seed(0)
    tokens, width = kernels.MIN_TOKENS_TO_RECOMPUTE, 512
    made = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    first, second = First(width, 4 * width, normalization="RMSNorm", **made), Second(2 * width, width, **made)
    first.layer_norm_weight.data.normal_(1, 0.2)
    x = torch.randn(tokens, 1, width, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn_like(x)
    swiglu = kernels._swiglu()

    def run(forgetting: bool) -> tuple[list[torch.Tensor], int]:
        into, out_of = first.forward, second.forward
        if forgetting:
            into = partial(kernels._norm_recomputed_in_backward, first, into)
            out_of = partial(kernels._swiglu_recomputed_in_backward, out_of)
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
        leaf = x.clone().requires_grad_()
        before = torch.cuda.memory_allocated()
        gate_and_up, _ = into(leaf)
        inner = swiglu.apply(gate_and_up.view(-1, 4 * width), False, False).view(tokens, 1, 2 * width)
        out, _ = out_of(inner)
        del gate_and_up, inner
        kept = torch.cuda.memory_allocated() - before
        out.backward(upstream)
        grads = [leaf.grad, first.weight.grad, first.layer_norm_weight.grad, second.weight.grad]
        return [grad.clone() for grad in grads if grad is not None], kept

    run(forgetting=False)  # workspaces
    plain, much = run(forgetting=False)
    mine, less = run(forgetting=True)
    assert len(mine) == 4
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    saved = tokens * (width + 2 * width) * 2  # the norm and SwiGLU's output, in bf16
    assert abs(much - less - saved) < saved / 20


@pytest.mark.parametrize("width", [128, 512])
def test_a_norm_and_its_gradients(width: int) -> None:
    import transformer_engine.pytorch as te

    from swift_megatron_grpo.training.fast_kernels import _rms_norm

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
    from swift_megatron_grpo.training.fast_kernels import _swiglu

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
