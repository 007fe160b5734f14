"""Megatron-core 0.17 and newer miss the kernels of Transformer Engine below 2.14; after the fix clipping uses them."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core import __version__, utils
from megatron.core.optimizer import clip_grads
from packaging.version import Version

from swift_megatron_grpo.platforms.cpu.transformer_engine import optimizers
from swift_megatron_grpo.training.upstream_fixes.multi_tensor_kernels import clip_with_transformer_engine
from tests.forking.client import run_code
from tests.unit.training.upstream_fixes.newer_transformer_engine import found_by_megatron

NAMES = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
FIXED = (optimizers.multi_tensor_applier, optimizers.multi_tensor_l2norm, optimizers.multi_tensor_scale)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Megatron falls back to."""
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None, raising=False)


def test_megatron_from_0_17_on_misses_kernels_of_transformer_engine_2_11() -> None:
    code = (
        "from swift_megatron_grpo.plugin.rank import hook_platform\n"
        "hook_platform()\n"
        "from megatron.core import utils\n"
        "from megatron.core.optimizer import clip_grads\n"
        "print(clip_grads.multi_tensor_applier is utils.local_multi_tensor_applier)\n"
    )
    missed = run_code("plain", code).splitlines()[-1] == "True"
    assert missed is (Version(__version__) >= Version("0.17")), "upstream has changed: see multi_tensor_kernels.py"


@pytest.mark.usefixtures("loops")
def test_the_fix_sets_the_kernels_in_place_of_the_loops() -> None:
    clip_with_transformer_engine()
    assert tuple(getattr(clip_grads, name) for name in NAMES) == FIXED


@pytest.mark.usefixtures("loops")
def test_nothing_is_set_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch.optimizers as installed

    monkeypatch.delattr(installed, "multi_tensor_l2norm")
    clip_with_transformer_engine()
    assert clip_grads.multi_tensor_applier is utils.local_multi_tensor_applier


def test_kernels_that_megatron_has_found_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in found_by_megatron().items():
        monkeypatch.setattr(clip_grads, name, function)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda *_: None)  # any function that is not a loop
    before = [getattr(clip_grads, name) for name in NAMES]
    clip_with_transformer_engine()
    assert [getattr(clip_grads, name) for name in NAMES] == before


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("fixed", [False, True])
def test_norm_and_clipped_gradients_are_those_of_the_loops(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # one rank
    if fixed:
        clip_with_transformer_engine()
    gradients = [torch.full((2, 8), 0.5), torch.full((3,), -1.0)]
    norm = clip_grads.get_grad_norm_fp32(gradients, grad_stats_parallel_group=torch.distributed.group.WORLD)
    assert float(norm) == pytest.approx(math.sqrt(7.0))
    weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    clip_grads.clip_grad_by_total_norm_fp32(weights, 1.0, norm)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient / (math.sqrt(7.0) + 1e-6))
