"""The product with an adapter in it, on a GPU: rounding, gradients in Megatron's fp32 buffer, the norm before it."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.layers.adapter_layers import AdaptedProduct, _normalized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS, IN, OUT, RANK, SCALING = 3000, 512, 1536, 16, 2.0


def test_output_and_gradients_are_those_of_the_merged_weight() -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight, bias = (
        torch.randn(TOKENS, 1, IN, **options),
        torch.randn(OUT, IN, **options),
        torch.randn(OUT, **options),
    )
    down, up = torch.randn(RANK, IN, **options), torch.randn(OUT, RANK, **options)
    leaves = [tensor.requires_grad_() for tensor in (x, down, up)]
    for parameter in (down, up):
        parameter.main_grad = torch.ones(parameter.shape, device="cuda")  # type: ignore[attr-defined]
    output = AdaptedProduct.apply(x, weight, bias, down, up, SCALING, False)
    direction = torch.randn_like(output)
    output.backward(direction)

    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    merged = weight.double() + SCALING * exact[2] @ exact[1]
    expected = torch.nn.functional.linear(exact[0], merged, bias.double())
    gradients = torch.autograd.grad(expected, exact, direction.double())
    found = [output, x.grad, down.main_grad - 1, up.main_grad - 1]  # type: ignore[attr-defined]
    for result, wanted in zip(found, [expected, *gradients], strict=True):
        assert result is not None and (result.double() - wanted).norm() / wanted.norm() < 2**-7
    assert down.grad is None and up.grad is None


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_is_that_of_transformer_engines_layer(zero_centered: bool) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.LayerNormLinear(
        IN, OUT, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16, device="cuda",
        return_layernorm_output=True, zero_centered_gamma=zero_centered,
    )  # fmt: skip
    layer.layer_norm_weight.data.normal_(0 if zero_centered else 1, 0.2)
    x = torch.randn(TOKENS, IN, device="cuda", dtype=torch.bfloat16)
    _, expected = layer(x)
    assert torch.equal(_normalized(layer, x), expected)
