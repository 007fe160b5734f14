"""The Transformer Engine stand-in: errors for unsupported parts; norms and linear layers match plain PyTorch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu import activate

activate()
import transformer_engine  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402

CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kwargs: te.Linear(8, 4, **kwargs),
    "LayerNormLinear": lambda **kwargs: te.LayerNormLinear(8, 4, **kwargs),
    "GroupedLinear": lambda **kwargs: te.GroupedLinear(2, 8, 4, **kwargs),
    "RMSNorm": lambda **kwargs: te.RMSNorm(8, **kwargs),
    "LayerNorm": lambda **kwargs: te.LayerNorm(8, **kwargs),
    "DotProductAttention": lambda **kwargs: te.DotProductAttention(2, 8, **kwargs),
    "FusedAdam": lambda **kwargs: te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(1))], **kwargs),
    "FusedSGD": lambda **kwargs: te.optimizers.FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, **kwargs),
}
OVERLAP = dict(ub_overlap_ag=True), dict(ub_overlap_rs=True)
MORE_OVERLAP = dict(ub_overlap_rs_dgrad=True), dict(ub_bulk_dgrad=True), dict(ub_bulk_wgrad=True)
FUSION = dict(fuse_wgrad_accumulation=True), dict(delay_wgrad_compute=True)
SHARED = *OVERLAP, *MORE_OVERLAP, *FUSION, dict(symmetric_ar_type="one_shot"), dict(parameters_split=("q", "k"))
UNSUPPORTED = [
    *(("Linear", kwargs) for kwargs in SHARED),
    *(("LayerNormLinear", kwargs) for kwargs in (*SHARED, dict(return_layernorm_output_gathered=True))),
    *(("GroupedLinear", kwargs) for kwargs in (*OVERLAP, *FUSION)),
    ("RMSNorm", dict(sm_margin=8)),
    ("DotProductAttention", dict(return_max_logit=True)),
    *(("FusedAdam", dict(kwargs)) for kwargs in (dict(amsgrad=True), dict(capturable=True), dict(set_grad_none=True))),
    *(("FusedAdam", {name: torch.uint8}) for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype")),
    ("FusedSGD", dict(wd_after_momentum=True)),
]
UNSUPPORTED_SYMBOLS = [
    "common.recipe.DelayedScaling",
    "pytorch.Fp8Padding",
    "pytorch.LayerNormMLP",
    "pytorch.attention.rope.apply_rotary_pos_emb",
    "pytorch.cross_entropy.parallel_cross_entropy",
    "pytorch.distributed.checkpoint",
    "pytorch.module.base.get_dummy_wgrad",
    "pytorch.ops.Sequential",
    "pytorch.router.fused_topk_with_score_function",
]


def case_id(case: Any) -> str:
    return "-".join(case) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_unknown_arguments_are_rejected(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name if 'Norm' not in name or 'Linear' in name else '_Norm'}.*'fancy'"):
        CONSTRUCTORS[name](fancy=False)


@pytest.mark.parametrize(("name", "kwargs"), UNSUPPORTED, ids=case_id)
def test_unsupported_arguments_are_rejected_by_name(name: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}\({next(iter(kwargs))}="):
        CONSTRUCTORS[name](**kwargs)


def test_forward_rejects_unknown_and_unsupported_arguments() -> None:
    x, layer = torch.ones(2, 8), te.Linear(8, 4)
    with pytest.raises(TypeError, match=r"Linear.forward\(\).*'fancy'"):
        layer(x, fancy=1)
    with pytest.raises(NotImplementedError, match=r"Linear.forward\(fp8_output=True\)"):
        layer(x, fp8_output=True)
    with pytest.raises(TypeError, match=r"GroupedLinear.forward\(\).*'fancy'"):
        te.GroupedLinear(1, 8, 4)(x, [2], fancy=1)
    with pytest.raises(ValueError, match="1 splits for 2 weights"):
        te.GroupedLinear(2, 8, 4)(x, [2])


def test_signatures_have_no_variadic_arguments() -> None:
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "LayerNorm", "DotProductAttention"):
        layer = getattr(te, name)
        for function in (layer.forward, *([] if "Linear" in name else [layer.__init__])):
            kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
            assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, (name, function)


@pytest.mark.parametrize("symbol", UNSUPPORTED_SYMBOLS)
def test_unsupported_symbols_raise_when_used(symbol: str) -> None:
    module, _, name = symbol.rpartition(".")
    with pytest.raises(
        NotImplementedError, match=f"transformer_engine.{symbol} is not implemented on the CPU platform"
    ):
        getattr(importlib.import_module(f"transformer_engine.{module}"), name)()


def test_unknown_symbols_raise_with_the_reason() -> None:
    reason = r"is not part of the CPU platform's stand-in \(the real package needs CUDA\)"
    with pytest.raises(AttributeError, match=rf"transformer_engine\.pytorch\.Foo {reason}"):
        _ = te.Foo
    with pytest.raises(ImportError, match=rf"transformer_engine\.pytorch\.Foo {reason}"):
        from transformer_engine.pytorch import Foo  # noqa: F401
    with pytest.raises(ImportError, match=rf"transformer_engine\.pytorch\.float8_tensor {reason}"):
        importlib.import_module("transformer_engine.pytorch.float8_tensor")
    assert not hasattr(te, "cpu_offload")


def test_fp8_is_off_and_cannot_be_enabled() -> None:
    assert not te.fp8.FP8GlobalStateManager.is_fp8_enabled()
    with te.fp8_autocast(enabled=False), te.fp8_model_init(enabled=False):
        pass
    with pytest.raises(NotImplementedError, match="fp8_autocast"), te.fp8_autocast():
        pass
    with pytest.raises(NotImplementedError, match="fp8_model_init"), te.fp8_model_init():
        pass
    assert transformer_engine.__version__ == "2.11.0"


# ---- arithmetic


def reference_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute the norm from its definition in fp64: RMSNorm without a bias, LayerNorm with one."""
    x, weight = x.double(), weight.double()
    centered = x if bias is None else x - x.mean(-1, keepdim=True)
    normalized = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    return normalized * weight + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_norms_match_the_definition(kind: str, zero_centered: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = getattr(te, kind)(16, eps=1e-6, zero_centered_gamma=zero_centered, params_dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    bias = torch.nn.init.normal_(norm.bias) if kind == "LayerNorm" else None
    x = torch.randn(5, 3, 16, dtype=dtype, requires_grad=True)
    gamma = norm.weight + 1 if zero_centered else norm.weight
    y, expected = norm(x), reference_norm(x, gamma, bias, 1e-6)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(y, [x, *norm.parameters()], upstream.to(dtype))
    expected_grads = torch.autograd.grad(expected, [x, *norm.parameters()], upstream)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=10 * tolerance, rtol=10 * tolerance)


def test_norm_parameters_are_marked_for_megatron() -> None:
    assert not hasattr(te.RMSNorm(4).weight, "sequence_parallel")
    marked = te.LayerNorm(4, sequence_parallel=True)
    assert marked.weight.sequence_parallel is True and marked.bias.sequence_parallel is True
    assert torch.equal(te.RMSNorm(4, zero_centered_gamma=True).weight, torch.zeros(4))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
def test_linear_matches_pytorch(bias: bool, return_bias: bool) -> None:
    layer = te.Linear(8, 4, bias=bias, return_bias=return_bias)
    x = torch.randn(3, 2, 8)
    if bias:
        torch.nn.init.normal_(layer.bias)
    output = layer(x)
    if return_bias:
        output, returned_bias = output
        assert returned_bias is layer.bias
        assert torch.equal(output, F.linear(x, layer.weight))
    else:
        assert torch.equal(output, F.linear(x, layer.weight, layer.bias if bias else None))
    assert bias or layer.bias.numel() == 0


def test_layer_norm_linear_returns_the_normalised_input_on_request() -> None:
    layer = te.LayerNormLinear(8, 4, bias=False, normalization="RMSNorm", eps=1e-6)
    x = torch.randn(3, 2, 8)
    normalized = F.rms_norm(x, (8,), layer.layer_norm_weight, 1e-6)
    assert torch.equal(layer(x), F.linear(normalized, layer.weight))
    layer.return_layernorm_output = True
    y, norm_output = layer(x)
    assert torch.equal(y, F.linear(normalized, layer.weight)) and torch.equal(norm_output, normalized)
    assert layer.layer_norm_bias is None


def test_grouped_linear_multiplies_each_experts_tokens() -> None:
    layer = te.GroupedLinear(3, 8, 4, bias=True)
    for gemm in range(3):
        torch.nn.init.normal_(getattr(layer, f"bias{gemm}"))
    x, splits = torch.randn(7, 8, requires_grad=True), [4, 0, 3]
    y = layer(x, splits)
    expected = torch.cat([F.linear(x[:4], layer.weight0, layer.bias0), F.linear(x[4:], layer.weight2, layer.bias2)])
    assert torch.equal(y, expected)
    y.sum().backward()
    assert torch.equal(layer.weight1.grad, torch.zeros(4, 8))  # an expert without tokens has a gradient too


@pytest.mark.parametrize(("mode", "dim"), [(None, 0), ("column", 0), ("row", 1)])
def test_weights_are_marked_tensor_parallel_as_in_transformer_engine(mode: str | None, dim: int) -> None:
    layer = te.Linear(8, 4, parallel_mode=mode, tp_size=1, bias=True)
    assert layer.weight.tensor_model_parallel is True
    assert (layer.weight.partition_dim, layer.weight.partition_stride) == (dim, 1)
    assert hasattr(layer.bias, "tensor_model_parallel") == (mode == "column")
    assert te.GroupedLinear(2, 8, 4, parallel_mode=mode).weight1.partition_dim == dim


def test_tensor_parallel_shapes_do_not_need_the_group() -> None:
    column, row = (te.Linear(8, 4, parallel_mode=mode, tp_size=2) for mode in ("column", "row"))
    assert column.weight.shape == (2, 8) and row.weight.shape == (4, 4)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        column(torch.ones(1, 8))
    with pytest.raises(ValueError, match="5 features are not divisible by tp_size 2"):
        te.Linear(8, 5, parallel_mode="column", tp_size=2)


def test_initialisation_uses_the_tracker_and_can_be_deferred() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    before = torch.get_rng_state()
    tracked = te.Linear(8, 4, init_method=torch.nn.init.normal_, get_rng_state_tracker=lambda: tracker)
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(tracked.weight, expected)
    deferred = te.LayerNormLinear(8, 4, device="meta", normalization="RMSNorm")
    assert deferred.weight.is_meta and not hasattr(deferred.weight, "tensor_model_parallel")
    deferred.reset_parameters()
    assert deferred.weight.device.type == "cpu" and deferred.weight.tensor_model_parallel
    assert torch.equal(deferred.layer_norm_weight, torch.ones(8))


def test_checkpoints_have_the_keys_of_transformer_engine() -> None:
    layer = te.LayerNormLinear(8, 4, normalization="LayerNorm")
    keys = {"layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state"}
    assert set(layer.state_dict()) == keys
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(NotImplementedError, match="fp8_state"):
        layer.set_extra_state(torch.ones(3, dtype=torch.uint8))
