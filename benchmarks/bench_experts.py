"""Measure the experts of one MoE layer, forward and backward: Transformer Engine against one kernel per product.

    python -m benchmarks.bench_experts --json experts.json          on a GPU, in about a minute
    python -m benchmarks.bench_experts --json experts.json --dry    on a CPU, with tiny sizes

A block is fc1, SwiGLU and fc2 on tokens that are sorted by expert; every token goes to --topk experts, which are drawn
from a seed and unevenly loaded. Each way runs in its own process and starts from the same weights and gradients:

    te           Transformer Engine's GroupedLinear, a weight per expert; cuBLAS adds to fp32 gradients
    te cutlass   the same with NVTE_USE_CUTLASS_GROUPED_GEMM=1
    stacked      torch's grouped_mm on stacked weights, whose bf16 weight gradients are added to fp32 ones
    parameters   the same with a parameter per expert for autograd and for the hooks of Megatron's DDP
    loop         a product per expert, by autograd; only with --dry
    tokens       what Megatron runs around the experts: permutation of tokens, SwiGLU weighted by probabilities

Weights are trained or frozen (as with LoRA: no weight gradients). Fields of a row of `rows`:

    host_forward_ms, host_backward_ms   time until all is enqueued, the GPU's queue being empty before
    gpu_forward_ms, gpu_backward_ms     time on the GPU if the host is ahead of it: the GPU first sleeps
    loop_ms                             time of a repetition, many of them enqueued in a row
    tflops, tflops_in_loop              products only, by the time on the GPU and by that of the loop

`errors` has the relative errors to fp64 of the worst expert, on memory that held NaN before; `kernels` has what one
forward and backward launched. A way or row that fails has its reason in `failures`. The file is written after every
row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.paths import REPOSITORY

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # Transformer Engine reads it in every call
MARK, READY = "ROW ", "READY"
START = 0.5  # value of the gradient buffers before an error is measured: a way must add to them
Block = Callable[[torch.Tensor, "Loads"], torch.Tensor]
MakePass = Callable[[], "tuple[Pass, list[torch.Tensor]]"]  # with the leaves that get gradients
Pass = tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]  # forward, and gradients of what it returns


@dataclass(frozen=True)
class Sizes:
    experts: int
    hidden: int
    ffn: int
    tokens: int
    topk: int

    @property
    def rows(self) -> int:
        return self.tokens * self.topk


@dataclass(frozen=True)
class Weights:
    """Weights of all experts, [experts, out, in], and their fp32 gradient buffers."""

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_grad: torch.Tensor
    fc2_grad: torch.Tensor

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.fc1, self.fc1_grad), (self.fc2, self.fc2_grad)]


@dataclass(frozen=True)
class Loads:
    """Rows of each expert, on the host and, as the ends of the experts' rows, on the device."""

    counts: list[int]
    ends: torch.Tensor


# ----------------------------------------------------------------------------------------------------------- the inputs


def draw_routing(sizes: Sizes, unevenness: float, empty: Sequence[int] = ()) -> torch.Tensor:
    """Return which experts each token goes to, [tokens, experts], with no token for the experts in `empty`."""
    generator = torch.Generator().manual_seed(0)
    favour = unevenness * torch.randn(sizes.experts, generator=generator)
    favour[list(empty)] = -torch.inf
    scores = torch.randn(sizes.tokens, sizes.experts, generator=generator) + favour
    routing = torch.zeros(sizes.tokens, sizes.experts, dtype=torch.bool)
    return routing.scatter_(1, scores.topk(sizes.topk, dim=1).indices, True)


def loads_of(routing: torch.Tensor, device: torch.device) -> Loads:
    counts = routing.sum(0)
    return Loads(counts.tolist(), counts.cumsum(0).to(torch.int32).to(device))


def draw_weights(sizes: Sizes, device: torch.device) -> Weights:
    generator = torch.Generator(device).manual_seed(0)

    def draw(out: int, width: int) -> torch.Tensor:
        values = torch.empty(sizes.experts, out, width, device=device, dtype=torch.bfloat16)
        return values.normal_(generator=generator).mul_(width**-0.5)

    fc1, fc2 = draw(2 * sizes.ffn, sizes.hidden), draw(sizes.hidden, sizes.ffn)
    fc1_grad, fc2_grad = (torch.full(weight.shape, START, device=device) for weight in (fc1, fc2))
    return Weights(fc1, fc2, fc1_grad, fc2_grad)


def draw_rows(sizes: Sizes, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(sizes.rows, sizes.hidden, device=device, dtype=torch.bfloat16).normal_(generator=generator)


# ------------------------------------------------------------------------------------------------------------- the ways


def as_in_megatron(parameter: torch.nn.Parameter, main_grad: torch.Tensor) -> Any:
    """Give a parameter the attributes and the hook of Megatron's DDP (distributed_data_parallel.py).

    Return the node that has the hook. It lives only as long as something refers to it.
    """
    weight: Any = parameter
    weight.main_grad, weight.grad_added_to_main_grad = main_grad, False

    def hook(*_: Any) -> None:
        if weight.grad is not None and (not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False)):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None

    node: Any = parameter.expand_as(parameter).grad_fn
    accumulator = node.next_functions[0][0]
    accumulator.register_hook(hook)
    return accumulator


def te_block(weights: Weights, trained: bool) -> Block:
    import transformer_engine.pytorch as te

    layers: list[Any] = []
    nodes: list[Any] = []
    for stacked, main_grad in weights.layers():
        experts, out, width = stacked.shape
        # The stand-in on a CPU leaves all gradients to the hook.
        layer = te.GroupedLinear(experts, width, out, bias=False, params_dtype=stacked.dtype, device=stacked.device,
                                 fuse_wgrad_accumulation=trained and stacked.is_cuda)  # fmt: skip
        for expert in range(experts):
            parameter = getattr(layer, f"weight{expert}")
            parameter.data = stacked[expert]
            parameter.requires_grad_(trained)
            if trained:
                nodes.append(as_in_megatron(parameter, main_grad[expert]))
        layers.append(layer)
    activation = swiglu_on(weights.fc1)

    def block(x: torch.Tensor, loads: Loads) -> torch.Tensor:
        y: torch.Tensor = layers[1](activation(layers[0](x, loads.counts)), loads.counts)
        return y

    return keeping(nodes, block)


def keeping(objects: Sequence[Any], block: Block) -> Block:
    """Return the block, which then keeps the objects alive."""

    def with_objects(x: torch.Tensor, loads: Loads, _: Sequence[Any] = objects) -> torch.Tensor:
        return block(x, loads)

    return with_objects


def stacked_block(weights: Weights, trained: bool) -> Block:
    return grouped_block(weights, [[], []], trained)


def parameters_block(weights: Weights, trained: bool) -> Block:
    """Build the block with the parameters of TEGroupedMLP, which are views of the stacked weights."""
    parameters, nodes = parameters_of(weights, trained)
    return keeping(nodes, grouped_block(weights, parameters, trained))


def parameters_of(weights: Weights, trained: bool) -> tuple[list[list[torch.nn.Parameter]], list[Any]]:
    """Return a parameter per layer and expert, and the nodes that have the hooks of those that are trained."""
    parameters: list[list[torch.nn.Parameter]] = []
    nodes: list[Any] = []
    for stacked, main_grad in weights.layers():
        parameters.append([torch.nn.Parameter(weight, requires_grad=trained) for weight in stacked])
        if trained:
            nodes += [as_in_megatron(*pair) for pair in zip(parameters[-1], main_grad, strict=True)]
    return parameters, nodes


def grouped_block(weights: Weights, parameters: Sequence[Sequence[torch.nn.Parameter]], trained: bool) -> Block:
    activation = swiglu_on(weights.fc1)
    (fc1, fc1_grad), (fc2, fc2_grad) = (
        (stacked, main_grad if trained else None) for stacked, main_grad in weights.layers()
    )

    def block(x: torch.Tensor, loads: Loads) -> torch.Tensor:
        h: torch.Tensor = GroupedProduct.apply(x, fc1, loads.ends, fc1_grad, *parameters[0])
        y: torch.Tensor = GroupedProduct.apply(activation(h), fc2, loads.ends, fc2_grad, *parameters[1])
        return y

    return block


class GroupedProduct(torch.autograd.Function):
    """Multiply the rows of each expert by its weight; backward adds to the gradient buffer, if there is one.

    Rows of an expert may be of any number, also 0: the kernels require 16-byte alignment only of the dimensions that
    are contiguous in memory, and rows are not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        stacked: torch.Tensor,
        ends: torch.Tensor,
        main_grad: torch.Tensor | None,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(None if main_grad is None else x, stacked, ends)
        ctx.main_grad, ctx.parameters = main_grad, parameters
        return grouped_mm(x, stacked.transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, stacked, ends = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = grouped_mm(grad, stacked, ends)
        if ctx.main_grad is None:
            return d_x, None, None, None, *[None] * len(ctx.parameters)
        ctx.main_grad.add_(grouped_mm(grad.t(), x, ends))
        for parameter in ctx.parameters:
            parameter.grad_added_to_main_grad = True
        return d_x, None, None, None, *(dummy_grad(parameter) for parameter in ctx.parameters)


_dummy_grads: dict[torch.Size, torch.Tensor] = {}


def dummy_grad(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that nobody reads: autograd runs a parameter's hook only if it has one."""
    if parameter.shape not in _dummy_grads:
        _dummy_grads[parameter.shape] = torch.empty_like(parameter, requires_grad=False)
    return _dummy_grads[parameter.shape].detach()


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    product: torch.Tensor = function(a, b, offs=ends)
    return product


def loop_block(weights: Weights, trained: bool) -> Block:
    parameters, nodes = parameters_of(weights, trained)

    def block(x: torch.Tensor, loads: Loads) -> torch.Tensor:
        pieces = zip(x.split(loads.counts), *parameters, strict=True)
        return torch.cat([F.linear(plain_swiglu(F.linear(rows, fc1)), fc2) for rows, fc1, fc2 in pieces])

    return keeping(nodes, block)


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_on(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the kernel of Transformer Engine, as training/fast_kernels.py has it; on a CPU the plain function."""
    if not tensor.is_cuda:
        return plain_swiglu
    import transformer_engine.pytorch  # noqa: F401  # it loads the library
    import transformer_engine_torch as kernels

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate_and_up)
            result: torch.Tensor = kernels.swiglu(gate_and_up, None)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            [gate_and_up] = ctx.saved_tensors
            result: torch.Tensor = kernels.dswiglu(grad.contiguous(), gate_and_up, None)
            return result

    apply: Callable[[torch.Tensor], torch.Tensor] = SwiGLU.apply
    return apply


WAYS: dict[str, Callable[[Weights, bool], Block]] = {
    "te": te_block,
    "te cutlass": te_block,
    "stacked": stacked_block,
    "parameters": parameters_block,
    "loop": loop_block,
}
TOKENS = "tokens"


# ----------------------------------------------------------------------------------------------------------- the errors


def errors_of(
    way: str, sizes: Sizes, unevenness: float, empty: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Return the relative errors of one forward and backward to fp64."""
    loads = loads_of(draw_routing(sizes, unevenness, empty), device)
    weights = draw_weights(sizes, device)
    x, upstream = (draw_rows(sizes, device, seed) for seed in (1, 2))
    expected = in_fp64(x, upstream, weights, loads)
    block = WAYS[way](weights, True)
    x.requires_grad_()
    poison_free_memory(device)
    y = block(x, loads)
    poison_free_memory(device)
    y.backward(upstream)
    assert x.grad is not None
    fc1_grad, fc2_grad = (grad.double() - START for _, grad in weights.layers())
    found = [*(rows.double().split(loads.counts) for rows in (y.detach(), x.grad)), fc1_grad, fc2_grad]
    names = ("output", "d_input", "d_fc1", "d_fc2")
    return {
        name: max(relative_error(a, b) for a, b in zip(values, other, strict=True))
        for name, values, other in zip(names, found, expected, strict=True)
    }


def in_fp64(
    x: torch.Tensor, upstream: torch.Tensor, weights: Weights, loads: Loads
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return output, input gradient and weight gradients of each expert."""
    results: list[tuple[torch.Tensor, ...]] = []
    pieces = zip(x.split(loads.counts), upstream.split(loads.counts), weights.fc1, weights.fc2, strict=True)
    for rows, grad, fc1, fc2 in pieces:
        inputs = [tensor.double().requires_grad_() for tensor in (rows, fc1, fc2)]
        y = F.linear(plain_swiglu(F.linear(inputs[0], inputs[1])), inputs[2])
        results.append((y.detach(), *torch.autograd.grad(y, inputs, grad.double())))
    y_all, d_x, d_fc1, d_fc2 = (list(column) for column in zip(*results, strict=True))
    return y_all, d_x, d_fc1, d_fc2


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error, or the absolute one where zeros are expected; NaN counts as infinite."""
    error, size = (found - expected).norm().item(), expected.norm().item()
    result = error / size if size else error
    return result if result == result else float("inf")


def poison_free_memory(device: torch.device) -> None:
    """Fill memory that the next tensors will be allocated from with NaN."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    block = torch.full((2**30 if device.type == "cuda" else 2**20,), torch.nan, device=device)
    del block


# ------------------------------------------------------------------------------------------------------------ the times


def timed(run: Pass, leaves: Sequence[torch.Tensor], repeats: int, gpu: bool) -> dict[str, float | None]:
    """Return the times of forward and backward, see the head of this file."""
    forward, upstream = run

    def prepared() -> None:
        for leaf in leaves:
            leaf.grad = None

    def once() -> None:
        prepared()
        torch.autograd.backward(forward(), upstream)

    for _ in range(3):
        once()
    forwards, backwards = [], []
    for _ in range(repeats):
        prepared()
        wait(gpu)
        start = time.perf_counter()
        outputs = forward()
        middle = time.perf_counter()
        torch.autograd.backward(outputs, upstream)
        end = time.perf_counter()
        forwards.append(1e3 * (middle - start))
        backwards.append(1e3 * (end - middle))
        del outputs
    wait(gpu)
    start = time.perf_counter()
    for _ in range(repeats):
        once()
    wait(gpu)
    result: dict[str, float | None] = {
        "host_forward_ms": median(forwards),
        "host_backward_ms": median(backwards),
        "loop_ms": 1e3 * (time.perf_counter() - start) / repeats,
        "gpu_forward_ms": None,
        "gpu_backward_ms": None,
    }
    if gpu:
        ahead = 1.5 * (max(forwards) + max(backwards)) + 1
        measured = [behind_a_sleep(forward, upstream, prepared, ahead) for _ in range(repeats)]
        result["gpu_forward_ms"], result["gpu_backward_ms"] = (median(column) for column in zip(*measured, strict=True))
    return result


def behind_a_sleep(
    forward: Callable[[], list[torch.Tensor]], upstream: list[torch.Tensor], prepare: Callable[[], None], ahead: float
) -> tuple[float, float]:
    """Return the milliseconds of forward and backward on the GPU, which sleeps until all is enqueued."""
    prepare()
    wait(True)
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(int(ahead * 2e6))  # cycles, of at most 2 GHz
    start.record()
    outputs = forward()
    middle.record()
    torch.autograd.backward(outputs, upstream)
    end.record()
    wait(True)
    return start.elapsed_time(middle), middle.elapsed_time(end)


def wait(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def kernels_of(run: Pass, leaves: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Return name, launches and total microseconds of the kernels of one forward and backward, longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for leaf in leaves:
        leaf.grad = None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.autograd.backward(run[0](), run[1])
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    kernels = [(round(sum(us), 1), len(us), name[:160]) for name, us in totals.items()]
    kernels.sort(reverse=True)
    return [{"name": name, "launches": launches, "us": us} for us, launches, name in kernels[:12]]


# ------------------------------------------------------------------------------------------ one way, in its own process


def rows_of_a_way(args: argparse.Namespace, way: str, device: torch.device) -> Iterator[dict[str, Any]]:
    gpu = device.type == "cuda"
    small = Sizes(16, args.hidden, args.ffn, args.error_tokens, args.topk)
    yield from attempt("errors", lambda: {"errors": errors_of(way, small, args.unevenness, (), device)})
    profiled: Callable[[], dict[str, Any]] | None = None
    for experts, trained in product(args.experts, (True, False)):
        all_sizes = [Sizes(experts, args.hidden, args.ffn, tokens, args.topk) for tokens in args.tokens]
        built: list[Block] = []
        yield from attempt("build", partial(build, way, all_sizes[0], trained, device, built))
        for block in built:
            for sizes in all_sizes:
                measurement = partial(measured_row, sizes, trained, block, args, device)
                yield from attempt(f"{sizes}, trained={trained}", measurement)
            if gpu and trained and profiled is None:
                profiled = partial(kernels_row, all_sizes[0], block, args, device)
        del built
    if profiled is not None:
        yield from attempt("kernels", profiled)
    # Last, because a kernel that fails on an expert without tokens may leave the process unusable.
    empty = (0, 5, 15)
    yield from attempt("errors", lambda: {"errors_with_empty": errors_of(way, small, args.unevenness, empty, device)})


def build(way: str, sizes: Sizes, trained: bool, device: torch.device, built: list[Block]) -> dict[str, Any]:
    built.append(WAYS[way](draw_weights(sizes, device), trained))
    return {}


def block_pass(
    sizes: Sizes, block: Block, args: argparse.Namespace, device: torch.device
) -> tuple[Pass, torch.Tensor, Loads]:
    """Return forward and upstream gradient, the input and the loads."""
    loads = loads_of(draw_routing(sizes, args.unevenness), device)
    x, upstream = draw_rows(sizes, device, 1).requires_grad_(), draw_rows(sizes, device, 2)
    return (lambda: [block(x, loads)], [upstream]), x, loads


def measured_row(
    sizes: Sizes, trained: bool, block: Block, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    run, x, loads = block_pass(sizes, block, args, device)
    times = timed(run, [x], args.repeats, device.type == "cuda")
    flops = 6.0 * sizes.rows * sizes.hidden * sizes.ffn * (3 if trained else 2)
    on_gpu = None if times["gpu_forward_ms"] is None else times["gpu_forward_ms"] + (times["gpu_backward_ms"] or 0)
    row: dict[str, Any] = {
        "experts": sizes.experts,
        "tokens": sizes.tokens,
        "weights": "trained" if trained else "frozen",
        "least_and_most_rows": [min(loads.counts), max(loads.counts)],
        **times,
        "gpu_ms": on_gpu,
        "tflops": flops / on_gpu / 1e9 if on_gpu else None,
        "tflops_in_loop": flops / (times["loop_ms"] or 0) / 1e9,
    }
    return {"row": row}


def kernels_row(sizes: Sizes, block: Block, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    run, x, _ = block_pass(sizes, block, args, device)
    return {"kernels": kernels_of(run, [x])}


def rows_of_tokens(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure what Megatron 0.18.2 runs around the experts with the dispatcher `alltoall`, without expert parallelism.

    `sort chunks` is its second permutation, which moves nothing here but runs.
    """
    for experts in args.experts:
        for tokens in args.tokens:
            sizes = Sizes(experts, args.hidden, args.ffn, tokens, args.topk)
            for name, make in token_passes(sizes, args, device):
                yield from attempt(f"{name} {sizes}", partial(row_of_pass, name, make, sizes, args, device))
    sizes = Sizes(args.experts[0], args.hidden, args.ffn, args.tokens[0], args.topk)
    for name, make in activation_passes(sizes, device):
        yield from attempt(name, partial(row_of_pass, name, make, sizes, args, device))


def row_of_pass(
    name: str, make: MakePass, sizes: Sizes, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    run, leaves = make()
    times = timed(run, leaves, args.repeats, device.type == "cuda")
    return {"row": {"name": name, "experts": sizes.experts, "tokens": sizes.tokens, **times}}


def token_passes(sizes: Sizes, args: argparse.Namespace, device: torch.device) -> list[tuple[str, MakePass]]:
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    routing = draw_routing(sizes, args.unevenness).to(device)
    weights = torch.rand(routing.shape, device=device)
    tokens = draw_rows(Sizes(1, sizes.hidden, 1, sizes.tokens, 1), device, 1)
    rows = draw_rows(sizes, device, 2)
    counts, order = routing.sum(0), torch.arange(sizes.experts, device=device)

    def permutation(fused: bool) -> tuple[Pass, list[torch.Tensor]]:
        leaf, probs = tokens.clone().requires_grad_(), (weights * routing).requires_grad_()

        def forward() -> list[torch.Tensor]:
            return list(permute(leaf, routing, probs, num_out_tokens=sizes.rows, fused=fused)[:2])

        return (forward, [rows, torch.ones(sizes.rows, device=device)]), [leaf, probs]

    def unpermutation(fused: bool) -> tuple[Pass, list[torch.Tensor]]:
        indices = permute(tokens, routing, weights * routing, num_out_tokens=sizes.rows, fused=fused)[2]
        leaf = rows.clone().requires_grad_()

        def forward() -> list[torch.Tensor]:
            return [unpermute(leaf, indices, tokens.shape, routing_map=routing, fused=fused)]

        return (forward, [tokens]), [leaf]

    def sorting(fused: bool) -> tuple[Pass, list[torch.Tensor]]:
        leaf, probs = rows.clone().requires_grad_(), torch.rand(sizes.rows, device=device).requires_grad_()

        def forward() -> list[torch.Tensor]:
            return list(sort_chunks_by_idxs(leaf, counts, order, probs=probs, fused=fused))

        return (forward, [rows, torch.ones_like(probs.detach())]), [leaf, probs]

    passes: list[tuple[str, MakePass]] = []
    for name, make in (("permute", permutation), ("sort chunks", sorting), ("unpermute", unpermutation)):
        for fused in (True, False):
            passes.append((f"{name}{', fused' if fused else ''}", lambda make=make, fused=fused: make(fused)))  # type: ignore[misc]
    return passes


def activation_passes(sizes: Sizes, device: torch.device) -> list[tuple[str, MakePass]]:
    """Return SwiGLU as Megatron runs it in an MoE layer (torch.compile), and the kernel for dense layers."""

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate_and_up = draw_rows(Sizes(1, 2 * sizes.ffn, 1, sizes.rows, 1), device, 1).requires_grad_()
        probs = torch.rand(sizes.rows, 1, device=device).requires_grad_()
        return gate_and_up, probs, draw_rows(Sizes(1, sizes.ffn, 1, sizes.rows, 1), device, 2)

    def plain() -> tuple[Pass, list[torch.Tensor]]:
        gate_and_up, _, upstream = draw()
        activation = swiglu_on(gate_and_up)
        return (lambda: [activation(gate_and_up)], [upstream]), [gate_and_up]

    def weighted() -> tuple[Pass, list[torch.Tensor]]:
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        gate_and_up, probs, upstream = draw()
        return (lambda: [weighted_bias_swiglu_impl(gate_and_up, None, probs)], [upstream]), [gate_and_up, probs]

    return [("SwiGLU", plain), ("SwiGLU, weighted", weighted)]


def attempt(what: str, function: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what the function returns, or why it failed."""
    try:
        found = function()
        if found:
            yield found
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines()
        reason = " ".join(lines[:3])[:400]
        yield {"failure": f"{what}: {type(error).__name__}: {reason} ({Path(where.filename).name}:{where.lineno})"}


def serve(args: argparse.Namespace) -> None:
    """Measure the way --only and print its rows; begin when the parent asks for it."""
    if args.dry:
        from swift_megatron_grpo.platforms.cpu import activate

        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        activate()
    if args.only in ("te", "te cutlass", "stacked", "parameters") and not args.dry:
        import transformer_engine.pytorch  # noqa: F401
    if args.only == TOKENS:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # starting more takes longer than they save here
        import megatron.core.transformer.moe.moe_utils  # noqa: F401
    print(READY, flush=True)
    sys.stdin.readline()
    device = torch.device("cpu" if args.dry else "cuda:0")
    rows = rows_of_tokens(args, device) if args.only == TOKENS else rows_of_a_way(args, args.only, device)
    for row in rows:
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


# --------------------------------------------------------------------------------------------------------- all the ways


def start(way: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != CUTLASS}
    if way == "te cutlass":
        environ[CUTLASS] = "1"
    command = [sys.executable, "-m", "benchmarks.bench_experts", *sys.argv[1:], "--only", way]
    return subprocess.Popen(command, env=environ, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    """Wait until the process has imported all, and return what it printed."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        if line.strip() == READY:
            break
        lines.append(line)
    return lines


def rows_from(process: subprocess.Popen[str], printed: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a process that is ready, and why it ended if it did not finish."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(max(seconds, 1.0), process.kill)
    timer.start()
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except OSError:
        pass  # it has ended; its exit code is reported below
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            elif line.strip():
                printed.append(line)
        if process.wait() == -signal.SIGKILL:
            printed.append("killed, perhaps at --deadline")
        if process.returncode != 0:
            yield {"failure": f"exit code {process.returncode}: {''.join(printed[-6:]).strip()[-1200:]}"}
    finally:
        timer.cancel()
        kill([process])


def kill(processes: Iterable[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()


def print_line(way: str, found: dict[str, Any]) -> None:
    """Print a row of the table, or the errors or the failure of a way."""
    row = found.get("row")
    if row is None:
        if "kernels" in found:
            launches = sum(kernel["launches"] for kernel in found["kernels"])
            print(f"{way:12} kernels: {launches} launches of the 12 longest kinds", flush=True)
        else:
            print(f"{way:12} {json.dumps(found)[:300]}", flush=True)
        return
    cells = [row.get(name) for name in ("host_forward_ms", "host_backward_ms", "gpu_forward_ms", "gpu_backward_ms",
                                        "loop_ms", "tflops", "tflops_in_loop")]  # fmt: skip
    numbers = "".join(f"{'' if cell is None else format(cell, '.3f'):>10}" for cell in cells)
    kind = row.get("weights") or row["name"]
    print(f"{way:12}{kind:18}{row['experts']:>4}{row['tokens']:>7}{numbers}", flush=True)


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file as a whole, so that it is complete at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def measure(args: argparse.Namespace) -> int:
    began = time.monotonic()
    device, versions = machine(revision(), PACKAGES)
    names = ("experts", "hidden", "ffn", "tokens", "topk", "unevenness", "error_tokens", "repeats", "dry")
    report: dict[str, Any] = {"device": device, "versions": versions,
                              "settings": {name: getattr(args, name) for name in names}, "ways": {}}  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    processes = {way: start(way) for way in args.ways}
    try:
        # Imports of one process would disturb the host times of another, so all are ready before the first begins.
        waiting = threading.Timer(args.deadline / 2, kill, [processes.values()])
        waiting.start()
        printed = {way: until_ready(process) for way, process in processes.items()}
        waiting.cancel()
        print(f"{'way':12}{'kind':18}{'e':>4}{'tokens':>7}{'host fwd':>10}{'host bwd':>10}{'gpu fwd':>10}"
              f"{'gpu bwd':>10}{'loop':>10}{'TFLOP/s':>10}{'in loop':>10}", flush=True)  # fmt: skip
        for way, process in processes.items():
            entry: dict[str, Any] = {"rows": [], "failures": []}
            way_began = time.monotonic()
            report["ways"][way] = entry
            for found in rows_from(process, printed[way], args.deadline - (time.monotonic() - began)):
                for key, value in found.items():
                    if key in ("row", "failure"):
                        entry[key + "s"].append(value)
                    else:
                        entry[key] = value
                entry["seconds"] = round(time.monotonic() - way_began, 1)
                print_line(way, found)
                write(args.json, report)
    finally:
        kill(processes.values())
    report["seconds"] = round(time.monotonic() - began, 1)
    write(args.json, report)
    failed = [way for way, entry in report["ways"].items() if entry["failures"]]
    print(f"{report['seconds']} s; failures: {', '.join(failed) or 'none'}", flush=True)
    return 0 if all(entry["rows"] for entry in report["ways"].values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the results")
    add("--ways", nargs="+", choices=[*WAYS, TOKENS], help="ways to measure; all but `loop` if left out")
    add("--experts", type=int, nargs="+", default=[64, 128], help="experts of the layer")
    add("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a micro batch")
    add("--topk", type=int, default=8, help="experts per token")
    add("--hidden", type=int, default=2048, help="hidden size")
    add("--ffn", type=int, default=768, help="intermediate size of an expert")
    add("--unevenness", type=float, default=0.4, help="standard deviation of the experts' scores; a token's is 1")
    add("--error-tokens", type=int, default=512, help="tokens with which errors are measured, on 16 experts")
    add("--repeats", type=int, default=7, help="measured repetitions; the median is reported")
    add("--deadline", type=float, default=150, help="seconds for the whole run; rows so far are kept")
    add("--dry", action="store_true", help="run tiny sizes on a CPU, to test this script")
    add("--only", help=argparse.SUPPRESS)  # the way that a started process measures
    args = parser.parse_args()
    args.json = args.json.resolve()
    if args.dry:
        args.experts, args.tokens, args.hidden, args.ffn, args.error_tokens = [16], [32, 64], 32, 16, 64
        args.topk, args.repeats = 4, 2
    elif not torch.cuda.is_available():
        parser.error("this machine has no GPU; use --dry")
    args.ways = args.ways or [way for way in (*WAYS, TOKENS) if args.dry or way != "loop"]
    return args


def main() -> int:
    args = parse()
    if args.only is not None:
        serve(args)
        return 0
    return measure(args)


if __name__ == "__main__":
    sys.exit(main())
