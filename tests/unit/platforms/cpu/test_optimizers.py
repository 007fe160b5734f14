"""The stand-in's optimizers and multi-tensor functions, compared with those of torch."""

from __future__ import annotations

import copy

import pytest
import torch

from swift_megatron_grpo.platforms.cpu.transformer_engine.optimizers import (
    FusedAdam,
    FusedSGD,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

SHAPES = [(5, 3), (7,), (1, 2, 4)]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], step: int, decoupled: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        grad = torch.randn(parameter.shape, generator=generator)
        if decoupled:
            parameter.decoupled_grad = grad
        else:
            parameter.grad = grad.to(parameter.dtype)


@pytest.mark.parametrize(("adam_w", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fused_adam_matches_adam_of_torch(
    adam_w: bool, torch_class: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    actual, reference = parameters(), parameters()
    settings = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    fused, expected = FusedAdam(actual, adam_w_mode=adam_w, **settings), torch_class(reference, **settings)
    for step in range(5):
        set_gradients(actual, step)
        set_gradients(reference, step)
        fused.step()
        expected.step()
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[a][name], expected.state[b][name], atol=1e-7, rtol=1e-5)


def test_states_have_the_names_that_megatron_reads() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert all(set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq"} for parameter in params)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in params)


def test_bias_correction_can_be_disabled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = FusedAdam([parameter], lr=1.0, betas=(0.9, 0.99), eps=0.0, bias_correction=False)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.1 / 0.01**0.5, rel=1e-5)


def test_a_parameter_without_gradient_is_unchanged() -> None:
    params = parameters()
    optimizer = FusedAdam(params, weight_decay=0.1)
    before = params[0].detach().clone()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], before) and not optimizer.state[params[0]]


@pytest.mark.parametrize("store_param_remainders", [False, True])
def test_master_weights_train_bf16_parameters_as_fp32(store_param_remainders: bool) -> None:
    actual, reference = (
        parameters(torch.bfloat16),
        [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)],
    )
    settings = dict(lr=1e-4, weight_decay=0.1)  # small steps: without masters bf16 would not move
    fused = FusedAdam(
        actual, master_weights=True, use_decoupled_grad=True, store_param_remainders=store_param_remainders, **settings
    )
    expected = torch.optim.AdamW(reference, **settings)
    for step in range(5):
        set_gradients(actual, step, decoupled=True)
        set_gradients(reference, step)
        fused.step()
        expected.step()
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(fused._master(a), b.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a.float(), b.detach(), atol=0, rtol=2**-8)
        assert fused.state[a]["master_param"].dtype == (torch.int16 if store_param_remainders else torch.float32)
    fused.zero_grad()
    assert all(parameter.decoupled_grad is None for parameter in actual)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_16_bit_states_are_within_tolerance(dtype: torch.dtype, tolerance: float) -> None:
    actual, reference = parameters(), parameters()
    fused = FusedAdam(actual, lr=1e-2, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    expected = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.0)
    for step in range(3):
        set_gradients(actual, step)
        set_gradients(reference, step)
        fused.step()
        expected.step()
    for a, b in zip(actual, reference, strict=True):
        assert fused.state[a]["exp_avg"].dtype == dtype
        torch.testing.assert_close(a, b, atol=tolerance * 1e-1, rtol=tolerance)
        torch.testing.assert_close(
            fused.get_unscaled_state(a, "exp_avg"), expected.state[b]["exp_avg"], atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kwargs", [{}, dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.float16)])
def test_training_resumes_from_the_state_dict(kwargs: dict[str, torch.dtype]) -> None:
    first = parameters()
    optimizer = FusedAdam(first, lr=1e-2, **kwargs)
    set_gradients(first, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = FusedAdam(second, lr=1e-2, **kwargs)
    resumed.load_state_dict(saved)
    for params, instance in ((first, optimizer), (second, resumed)):
        set_gradients(params, 1)
        instance.step()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert resumed.param_groups[0]["step"] == 2


def test_a_new_optimizer_has_no_states_after_loading_its_own() -> None:
    """Megatron loads an optimizer's own state when it builds it, and later checks if the state is empty."""
    optimizer = FusedAdam(parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state) == 0


def test_states_can_be_set_one_by_one() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, exp_avg_dtype=torch.float16)
    values = {name: torch.rand(SHAPES[0]) for name in ("exp_avg", "exp_avg_sq", "master_param")}
    for name, value in values.items():
        optimizer.set_scaled_state(params[0], name, value)
    for name, value in values.items():
        torch.testing.assert_close(optimizer.get_unscaled_state(params[0], name), value, atol=1e-3, rtol=1e-3)


def test_fused_sgd_matches_sgd_of_torch() -> None:
    actual, reference = parameters(), parameters()
    settings = dict(lr=0.1, momentum=0.9, weight_decay=0.01)
    fused, expected = FusedSGD(actual, **settings), torch.optim.SGD(reference, **settings)
    for step in range(3):
        set_gradients(actual, step)
        set_gradients(reference, step)
        fused.step()
        expected.step()
    assert all(torch.equal(a, b) for a, b in zip(actual, reference, strict=True))


def test_multi_tensor_functions_match_their_definitions() -> None:
    tensors, flag = (
        [torch.full((3,), 2.0), torch.full((4,), -1.0, dtype=torch.bfloat16)],
        torch.zeros(1, dtype=torch.int),
    )
    norm, norms = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], True)
    assert norm.shape == (1,) and norm.item() == pytest.approx(4.0)
    torch.testing.assert_close(norms, torch.tensor([12.0**0.5, 2.0]))
    assert multi_tensor_applier(multi_tensor_l2norm, flag, [[]], False)[0].item() == 0.0
    multi_tensor_applier(multi_tensor_scale, flag, [tensors, tensors], 0.5)
    assert torch.equal(tensors[0], torch.ones(3)) and flag.item() == 0
    multi_tensor_applier(multi_tensor_scale, flag, [[torch.tensor([torch.inf])], [torch.zeros(1)]], 0.5)
    assert flag.item() == 1
