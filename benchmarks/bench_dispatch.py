"""Measure how long tokens take to the experts of other GPUs and back, by Megatron's dispatcher and by this package's.

    torchrun --nproc_per_node 4 -m benchmarks.bench_dispatch --json dispatch.json         on GPUs, in half a minute
    torchrun --nproc_per_node 2 -m benchmarks.bench_dispatch --json dispatch.json --dry   on a CPU, with tiny sizes

All that a layer of experts does but the experts themselves: in place of its experts a rank multiplies each row by its
score. So the times have no matrix products, and ranks wait for each other only as far as rows are uneven. Fields of a
row of `rows`, with times and rows of the slowest and of the fullest rank:

    way           each: a row for each pair of a token and an expert (Megatron's alltoall dispatcher)
                  once: a row for each pair of a token and a GPU (training/moe/row_dispatch.py)
    forward_ms, backward_ms, rows      rows: that leave a GPU in forward, and again on the way back
    exchange_ms, exchange_gb_per_s     one all-to-all of those rows by itself
    counts_ms     an all-to-all of eight numbers a GPU, which is what one costs without bytes
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.experts.inputs import Sizes, draw_routing
from benchmarks.harness.processes import devices_locked

WAYS = ("each", "once")
WARM_UP = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the results")
    add("--experts", type=int, default=128, help="experts of the layer")
    add("--topk", type=int, default=8, help="experts per token")
    add("--hidden", type=int, default=2048, help="hidden size")
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens of a rank")
    add("--unevenness", type=float, nargs="+", default=[0.0, 0.4], help="deviation of the experts' scores from even")
    add("--repeats", type=int, default=20, help="measured repetitions; the median is reported")
    add("--dry", action="store_true", help="run tiny sizes on a CPU, to test this script")
    args = parser.parse_args()
    if args.dry:
        args.experts, args.topk, args.hidden, args.tokens, args.repeats = 8, 2, 32, [64], 3
    elif not torch.cuda.is_available():
        parser.error("this machine has no GPU; use --dry")
    return args


def main() -> None:
    args = parse()
    is_first = os.environ["RANK"] == "0"
    with devices_locked() if is_first else nullcontext():  # the other ranks wait for the first one
        measure(args, is_first)


def measure(args: argparse.Namespace, writes: bool) -> None:
    if args.dry:
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.dry else "nccl")
    make = dispatchers(args)
    rows = []
    for tokens, unevenness in product(args.tokens, args.unevenness):
        sizes = Sizes(args.experts, args.hidden, 0, tokens, args.topk)
        passes = {way: Pass(make(way), way, sizes, unevenness) for way in WAYS}
        compare(passes, 1e-5 if args.dry else 1e-2)
        times = timed(passes, args.repeats)
        for way in WAYS:
            rows.append({"way": way, "tokens": tokens, "unevenness": unevenness, **times[way]})
            if writes:
                print(json.dumps(rows[-1]), flush=True)
    if writes:
        device, versions = machine(revision(), PACKAGES)
        settings = {name: getattr(args, name) for name in ("experts", "topk", "hidden", "repeats")}
        report = {"device": device, "ranks": dist.get_world_size(), "versions": versions, "settings": settings}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def dispatchers(args: argparse.Namespace) -> Callable[[str], Any]:
    """Return a function that makes the dispatcher of a way, with all ranks in one expert-parallel group."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from swift_megatron_grpo.training.moe.row_dispatch import RowDispatcher

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        expert_model_parallel_size=ranks,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=not args.dry,
        params_dtype=torch.float32 if args.dry else torch.bfloat16,
    )
    local = args.experts // ranks
    first = dist.get_rank() * local

    def make(way: str) -> Any:
        upstream = MoEAlltoAllTokenDispatcher(local, list(range(first, first + local)), config, groups)
        return upstream if way == "each" else RowDispatcher(upstream)

    return make


class Pass:
    """Forward and backward of one dispatcher on tokens of this rank, which are drawn from a seed."""

    def __init__(self, dispatcher: Any, way: str, sizes: Sizes, unevenness: float) -> None:
        device, dtype = torch.device("cuda"), dispatcher.config.params_dtype
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._dispatcher = dispatcher
        self._routing = draw_routing(sizes, unevenness, tokens_seed=dist.get_rank()).to(device)
        scores = torch.rand(self._routing.shape, generator=generator).to(device) * self._routing
        self._scores = scores.requires_grad_()
        tokens, gradient = torch.randn(2, sizes.tokens, 1, sizes.hidden, generator=generator).to(device, dtype)
        self._tokens: torch.Tensor = tokens.requires_grad_()
        self._gradient: torch.Tensor = gradient
        self._output = torch.empty(0)
        self._sent, self._received = exchanged_rows(self._routing, way)

    def forward(self) -> None:
        dispatcher = self._dispatcher
        rows, scores = dispatcher.dispatch_preprocess(self._tokens, self._routing, self._scores)
        rows, scores = dispatcher.token_dispatch(rows, scores)
        rows, _, scores = dispatcher.dispatch_postprocess(rows, scores)
        rows = rows * scores.unsqueeze(-1).to(rows.dtype)
        self._output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))

    def backward(self) -> None:
        torch.autograd.grad(self._output, [self._tokens, self._scores], self._gradient)

    def results(self) -> list[torch.Tensor]:
        """Return the output and the gradients of tokens and scores."""
        self.forward()
        gradients = torch.autograd.grad(self._output, [self._tokens, self._scores], self._gradient)
        return [self._output.detach(), *gradients]

    def exchange(self) -> None:
        """Send the rows of a forward pass, without sorting or adding them."""
        sent = self._tokens.new_empty(sum(self._sent), self._tokens.shape[-1])
        received = self._tokens.new_empty(sum(self._received), self._tokens.shape[-1])
        dist.all_to_all_single(received, sent, self._received, self._sent)

    def counts(self) -> None:
        numbers = torch.empty(8 * dist.get_world_size(), dtype=torch.int64, device="cuda")
        dist.all_to_all_single(torch.empty_like(numbers), numbers)

    @property
    def rows_that_leave(self) -> int:
        return sum(self._sent) - self._sent[dist.get_rank()]

    @property
    def bytes_of_row(self) -> int:
        return self._tokens.shape[-1] * self._tokens.element_size()


def exchanged_rows(routing: torch.Tensor, way: str) -> tuple[list[int], list[int]]:
    """Return the rows that this rank sends to each rank, and those that it receives. `routing`: [tokens, experts]."""
    by_rank = routing.view(len(routing), dist.get_world_size(), -1)  # [tokens, ranks, local experts]
    sent = (by_rank.sum((0, 2)) if way == "each" else by_rank.any(2).sum(0)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return sent.tolist(), received.tolist()


def timed(passes: dict[str, Pass], repeats: int) -> dict[str, dict[str, float]]:
    """Return the times of each way. Ways alternate, so that both meet the same disturbances."""
    parts = ("forward", "backward", "exchange", "counts")
    seconds: dict[str, dict[str, list[float]]] = {way: {part: [] for part in parts} for way in passes}
    for repeat in range(repeats + WARM_UP):
        for way, measured in passes.items():
            for part in parts:
                spent = slowest(getattr(measured, part))
                if repeat >= WARM_UP:
                    seconds[way][part].append(spent)
    return {way: row_of(passes[way], {part: median(seconds[way][part]) for part in parts}) for way in passes}


def slowest(function: Callable[[], None]) -> float:
    """Return the seconds that the slowest rank takes; all begin together."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return of_all_ranks(time.perf_counter() - start)


def row_of(measured: Pass, seconds: dict[str, float]) -> dict[str, float]:
    rows = of_all_ranks(measured.rows_that_leave)
    return {
        "rows": int(rows),
        **{f"{part}_ms": round(1e3 * spent, 4) for part, spent in seconds.items()},
        "exchange_gb_per_s": round(rows * measured.bytes_of_row / seconds["exchange"] / 1e9, 1),
    }


def of_all_ranks(value: float) -> float:
    """Return the largest."""
    largest = torch.tensor(float(value), dtype=torch.float64, device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def compare(passes: dict[str, Pass], tolerance: float) -> None:
    """Raise AssertionError if the ways compute something different."""
    each, once = (passes[way].results() for way in WAYS)
    for name, one, other in zip(("output", "tokens", "scores"), each, once, strict=True):
        error = (one - other).double().norm() / one.double().norm()
        assert error < tolerance, f"the {name} of the two ways differ by {error:.2g} of their size"


if __name__ == "__main__":
    main()
