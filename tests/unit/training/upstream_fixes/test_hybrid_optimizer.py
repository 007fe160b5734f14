"""Megatron's optimizer with states on the CPU starts from the weights that were loaded last."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.platforms.cpu import activate

if not torch.cuda.is_available():
    activate()
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from transformer_engine.pytorch.optimizers import FusedAdam

from swift_megatron_grpo.training.upstream_fixes.hybrid_optimizer import loading


def hybrid_of(*parameters: torch.nn.Parameter) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(
        [{"params": list(parameters), "lr": 0.1}], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=FusedAdam, param_update_in_fp32=True, lr=0.1,
    )  # fmt: skip


def loaded() -> tuple[torch.nn.Parameter, HybridDeviceOptimizer]:
    """A parameter whose optimizer was built when it was 1, and which was loaded as 5 afterwards."""
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    hybrid = hybrid_of(parameter)
    with torch.no_grad():
        parameter.fill_(5)
    return parameter, hybrid


def step(parameter: torch.nn.Parameter, hybrid: HybridDeviceOptimizer) -> float:
    parameter.grad = torch.ones_like(parameter)
    hybrid.step()
    return parameter.mean().item()


def test_upstream_steps_from_the_weights_before_the_load() -> None:
    """This fails once megatron-core is mended; copying the weights again can then go."""
    parameter, hybrid = loaded()
    hybrid.update_fp32_param_by_new_param()  # what Megatron's reload_model_params calls
    assert step(parameter, hybrid) < 1


def test_the_first_step_is_from_the_loaded_weights() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    hybrid = hybrid_of(parameter)
    with loading(FP32Optimizer(hybrid, OptimizerConfig(), lambda *_: None), with_states=False), torch.no_grad():
        parameter.fill_(5)
    assert 4.8 < step(parameter, hybrid) < 5


def test_upstream_saves_classes_that_torch_does_not_load(tmp_path: Path) -> None:
    """This fails once megatron-core is mended; removing the classes can then go."""
    parameter, hybrid = loaded()
    torch.save(hybrid.state_dict(), tmp_path / "states.pt")
    with pytest.raises(pickle.UnpicklingError, match="AdamW"):
        torch.load(tmp_path / "states.pt", weights_only=True)
    with loading(FP32Optimizer(hybrid, OptimizerConfig(), lambda *_: None), with_states=True):
        step(parameter, hybrid)
    torch.save(hybrid.state_dict(), tmp_path / "states.pt")
    assert torch.load(tmp_path / "states.pt", weights_only=True)["param_groups"][0]["lr"] == 0.1
