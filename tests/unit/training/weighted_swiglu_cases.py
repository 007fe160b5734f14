"""Compares the kernels of the weighted SwiGLU with fp64: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.training.weighted_swiglu_cases      runs the cases
python -m tests.unit.training.weighted_swiglu_cases compile     compiles the kernels for an H100 or H200, without a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swift_megatron_grpo.training.moe import weighted_swiglu as kernels

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.float32
    scale: float = 2.0
    strided: bool = False  # the inputs and the gradient are parts of larger tensors


CASES = [
    Case("whole tiles", 8, 512),
    Case("a ragged last tile in both directions", 7, 768 + 5),
    Case("narrower than a tile, of odd width", 5, 33),
    Case("one row", 1, 256),
    Case("one column", 3, 1),
    Case("no rows", 0, 64),
    Case("fp32", 6, 300, dtype=torch.float32),
    Case("fp16", 6, 300, dtype=torch.float16),
    Case("probabilities in bf16", 6, 300, weights=torch.bfloat16),
    Case("saturated gates", 4, 100, scale=300.0),
    Case("strided", 6, 96, strided=True),
]
PRECISION = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}  # fp32: several roundings


def inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gate and up, weights, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    step = 2 if case.strided else 1
    gate_and_up, upstream = (
        (torch.randn(case.rows, step * columns, generator=generator) * case.scale).to(device, case.dtype)[:, ::step]
        for columns in (2 * case.width, case.width)
    )
    weights = torch.rand(case.rows, step, generator=generator).to(device, case.weights)[:, ::step]
    return gate_and_up.requires_grad_(), weights.requires_grad_(), upstream


def in_fp64(
    gate_and_up: torch.Tensor, weights: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the exact output, and the exact gradients of both inputs."""
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (gate_and_up, weights))
    gate, up = wide.chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up * weight
    return exact.detach(), *torch.autograd.grad(exact, (wide, weight), upstream.double())


def check(case: Case, device: str, function: Function) -> None:
    """Compare output and gradients with fp64, and their types and shapes with those of the inputs."""
    gate_and_up, weights, upstream = inputs(case, device)
    kept = gate_and_up.detach().clone(), weights.detach().clone()
    out = function(gate_and_up, weights)
    found = (out, *torch.autograd.grad(out, (gate_and_up, weights), upstream))
    assert torch.equal(gate_and_up, kept[0]) and torch.equal(weights, kept[1]), "the kernels must not write to inputs"
    exact = in_fp64(gate_and_up, weights, upstream)
    types = (case.dtype, case.dtype, case.weights)
    roundings = 2 if device == "cpu" else 1  # Triton's interpreter cuts digits off
    for name, dtype, value, expected in zip(("y", "dx", "dp"), types, found, exact, strict=True):
        assert value.dtype == dtype and value.shape == expected.shape, (case.name, name, value.dtype, value.shape)
        size = expected.abs().max().item() if expected.numel() else 0.0
        excess = (value.double() - expected).abs() - 1.01 * roundings * PRECISION[dtype] * expected.abs()
        # Terms of a sum cancel, and tiny values vanish.
        assert not (excess > 2e-6 * size).any(), f"{case.name}, {name}: {excess.max().item()} of {size}"
        assert value.isfinite().all(), f"{case.name}, {name}"


def check_nan(device: str, function: Function) -> None:
    """Check that a NaN reaches its own row only."""
    gate_and_up = torch.ones(3, 10, device=device, requires_grad=True)
    weights = torch.ones(3, 1, device=device, requires_grad=True)
    with torch.no_grad():
        gate_and_up[1, 7] = torch.nan
    out = function(gate_and_up, weights)
    d_gate_and_up, d_weights = torch.autograd.grad(out.sum(), (gate_and_up, weights))
    assert out.isnan().nonzero().tolist() == [[1, 2]]
    assert d_gate_and_up.isnan().nonzero().tolist() == [[1, 2]]
    assert d_weights.isnan().flatten().tolist() == [False, True, False]


def megatrons() -> tuple[Function, Function]:
    """Return Megatron's function as it calls its own class, and as it calls the replacement."""
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    from megatron.core.fusions import fused_bias_swiglu

    def with_class(of: type[torch.autograd.Function]) -> Function:
        def call(gate_and_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            fused_bias_swiglu.WeightedSwiGLUFunction = of
            result: torch.Tensor = fused_bias_swiglu.weighted_bias_swiglu_impl(gate_and_up, None, weights, False)
            return result

        return call

    return with_class(fused_bias_swiglu.WeightedSwiGLUFunction), with_class(kernels.WeightedSwiGLU)


def check_against_megatron(device: str, own: Function, replaced: Function) -> None:
    """Check that both return the same types and shapes, and values that differ by roundings."""
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                (torch.bfloat16, torch.bfloat16)):  # fmt: skip
        gate_and_up, weights, upstream = inputs(Case("", 37, 65, dtype, weight_dtype), device)
        results = []
        for function in (own, replaced):
            out = function(gate_and_up, weights)
            results.append((out, *torch.autograd.grad(out, (gate_and_up, weights), upstream)))
        for expected, value in zip(*results, strict=True):
            assert value.dtype == expected.dtype and value.shape == expected.shape
            error = (value - expected).double().norm() / expected.double().norm()
            assert error < (1e-6 if dtype == torch.float32 else 0.01), (dtype, weight_dtype, error)


def compile_for_hopper(inputs: str, weights: str) -> None:
    """Compile the kernels for arguments as in a launch; the interpreter accepts much that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {"rows": "i32", "width": "i32", "ROWS": "constexpr", "COLUMNS": "constexpr"}
    signatures = {
        kernels._forward: {"gate_and_up": inputs, "weights": weights, "out": inputs, **numbers},
        kernels._backward: {
            "grad": inputs, "gate_and_up": inputs, "weights": weights, "d_gate_and_up": inputs, "d_weights": weights,
            **numbers,
        },
    }  # fmt: skip
    for kernel, signature in signatures.items():
        free = [parameter.name for parameter in kernel.params if parameter.do_not_specialize]
        assert free == ["rows"], "another number of rows must not compile another kernel"
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(signature.items())
            if kind != "constexpr" and name not in free
        }
        constants = {"ROWS": kernels._ROWS, "COLUMNS": kernels._COLUMNS}
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )  # fmt: skip
        text = compiled.asm["ptx"]
        for access in ("ld.global.v4", "st.global.v4"):
            assert access in text, "the kernel must load and store 16 bytes at a time"


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        for inputs_, weights_ in (("*bf16", "*fp32"), ("*bf16", "*bf16"), ("*fp32", "*fp32")):
            compile_for_hopper(inputs_, weights_)
        print("compiled")
    else:
        own, replaced = megatrons()
        for case in CASES:
            check(case, "cpu", replaced)
        check_nan("cpu", replaced)
        check_against_megatron("cpu", own, replaced)
        print(f"{len(CASES) + 2} cases")
