"""Measure time and peak memory of the head, forward and backward, against computing all logits at once.

    python -m benchmarks.bench_head --rows 16384 --hidden 2048 --vocab 151936 --dtype bf16 --json head.json     on a GPU
    python -m benchmarks.bench_head --rows 16384 --hidden 32 --vocab 151936 --dtype fp32 --repeats 1            on a CPU

All arms start from the same rows of hidden states and compute the gradients of these rows and of the weight:

    products        only the matrix products of the head, a lower bound for every implementation
    ms-swift        all logits, divided by the temperature, then ms-swift's compute_logps_and_entropy_from_logits
    head            this package's head, for each of --chunks; "auto" is the chunk size that training uses
    head, frozen    the same with a weight that is not trained, as with LoRA on other layers

Memory is the allocator's peak, in addition to the rows, the weight and the weight's fp32 gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from swift_megatron_grpo.training.head.fused import Head, fused_log_probs, rows_per_chunk
from swift_megatron_grpo.training.head.matmuls import add_d_weight_, d_rows_of, logits_into
from swift_megatron_grpo.training.head.row_statistics import Vocabulary

TEMPERATURE = 0.9
Pass = Callable[[], tuple[float, float]]  # runs forward and backward; returns the seconds of each


@dataclass(frozen=True)
class Inputs:
    rows: torch.Tensor  # [k, h]
    weight: torch.nn.Parameter  # [v, h], with main_grad [v, h] fp32 as Megatron's DDP gives it
    targets: torch.Tensor  # [k]
    entropy: bool

    @property
    def upstream(self) -> torch.Tensor:
        return torch.ones(len(self.rows), 1 + self.entropy, device=self.rows.device)


@dataclass(frozen=True)
class Result:
    arm: str
    chunk: int | None
    forward_ms: float | None
    backward_ms: float | None
    peak_mib: float | None
    skipped: str | None = None  # reason, if the arm was not measured


def make_inputs(arguments: argparse.Namespace, device: torch.device) -> Inputs:
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.dtype]
    rows = torch.randn(arguments.rows, arguments.hidden, device=device, dtype=dtype).requires_grad_()
    scale = 3 / arguments.hidden**0.5  # logits as large as those of a trained model
    weight = torch.nn.Parameter(torch.randn(arguments.vocab, arguments.hidden, device=device, dtype=dtype) * scale)
    weight.main_grad = torch.zeros(weight.shape, device=device)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    targets = torch.randint(0, arguments.vocab, (arguments.rows,), device=device)
    return Inputs(rows, weight, targets, arguments.entropy)


# ------------------------------------------------------------------------------------------------------------- the arms


def products(inputs: Inputs, chunk: int) -> Pass:
    rows, weight = inputs.rows.detach(), inputs.weight.detach()

    def forward() -> torch.Tensor:
        logits = rows.new_empty(chunk, len(weight))
        for chunk_rows in rows.split(chunk):
            logits_into(logits[: len(chunk_rows)], chunk_rows, weight)
        return logits

    def backward(logits: torch.Tensor) -> None:
        d_rows = torch.empty_like(rows)
        chunks = list(zip(rows.split(chunk), d_rows.split(chunk), strict=True))
        for chunk_rows, d_chunk in reversed(chunks):
            if chunk_rows is not chunks[-1][0]:  # the last chunk's logits are still in the buffer
                logits_into(logits[: len(chunk_rows)], chunk_rows, weight)
            d_chunk.copy_(d_rows_of(logits[: len(chunk_rows)], weight))
            add_d_weight_(inputs.weight.main_grad, logits[: len(chunk_rows)], chunk_rows)  # type: ignore[attr-defined]

    return timed(forward, backward)


def head(inputs: Inputs, chunk: int) -> Pass:
    settings = Head(Vocabulary(0, len(inputs.weight), TEMPERATURE, None), inputs.entropy, chunk)

    def forward() -> torch.Tensor:
        return fused_log_probs(inputs.rows, inputs.weight, inputs.targets, settings)

    return timed(forward, lambda values: values.backward(inputs.upstream))


def frozen_head(inputs: Inputs, chunk: int) -> Pass:
    weight = torch.nn.Parameter(inputs.weight.detach(), requires_grad=False)
    return head(Inputs(inputs.rows, weight, inputs.targets, inputs.entropy), chunk)


def ms_swift(inputs: Inputs) -> Pass:
    """Build the pass of ms-swift 4.6.0 (grpo_trainer.py, forward_step): divide by the temperature, then its function.

    The division is `logits_packed.div_(self.temperature)`.
    """
    from swift.megatron.trainers.vocab_parallel_utils import compute_logps_and_entropy_from_logits

    def forward() -> torch.Tensor:
        logits = torch.nn.functional.linear(inputs.rows[None], inputs.weight)  # [1, k, v]
        logits.div_(TEMPERATURE)
        logprobs, entropy = compute_logps_and_entropy_from_logits(logits, inputs.targets[None], inputs.entropy)
        return torch.stack([logprobs[0]] if entropy is None else [logprobs[0], entropy[0]], -1)

    def backward(values: torch.Tensor) -> None:
        values.backward(inputs.upstream)
        inputs.weight.main_grad.add_(inputs.weight.grad)  # type: ignore[attr-defined]  # DDP's hook does this

    return timed(forward, backward)


# ------------------------------------------------------------------------------------------------------------ measuring


def timed(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]) -> Pass:
    def run() -> tuple[float, float]:
        start = now()
        values = forward()
        middle = now()
        backward(values)
        return middle - start, now() - middle

    return run


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(arm: str, chunk: int | None, run: Pass, inputs: Inputs, repeats: int) -> Result:
    def once() -> tuple[float, float]:
        inputs.rows.grad = inputs.weight.grad = None
        return run()

    try:
        peak = peak_bytes(once)  # warms up as well
        times = [once() for _ in range(repeats)]
    except torch.OutOfMemoryError as error:
        return Result(arm, chunk, None, None, None, f"out of memory: {str(error).splitlines()[0][:80]}")
    inputs.rows.grad = inputs.weight.grad = None
    forward, backward = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return Result(arm, chunk, forward, backward, peak / 2**20)


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak memory that torch allocated while the function ran, in addition to what was allocated before.

    It is counted at the allocator and so includes the temporary buffers of operators.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    assert measured.profiler is not None
    live = peak = 0
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()  # negative where memory is freed
        peak = max(peak, live)
    return peak


def too_large_for_cpu(arguments: argparse.Namespace) -> str | None:
    """Return why the memory is too small for the ms-swift arm, or None if it is enough.

    That arm holds all logits, their fp32 copy if they are not fp32, the gradient in fp32, and the gradient in the
    logits' dtype.
    """
    if torch.cuda.is_available():
        return None
    item = 2 if arguments.dtype == "bf16" else 4
    needed = arguments.rows * arguments.vocab * (item + 4 + 4 + item)
    free = next(
        1024 * int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    if needed < free:
        return None
    return f"needs about {needed / 2**30:.0f} GiB, but only {free / 2**30:.0f} GiB are free"


def initialize_megatron() -> None:
    """Initialize Megatron with one rank, because ms-swift's function reads its tensor-parallel group."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    from megatron.core import mpu

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()


def print_table(results: Sequence[Result], flops: float) -> None:
    print(f"{'arm':16}{'chunk':>8}{'forward ms':>12}{'backward ms':>13}{'total ms':>11}{'TFLOP/s':>9}{'peak MiB':>10}")
    for r in results:
        chunk = "all" if r.chunk is None else str(r.chunk)
        if r.forward_ms is None or r.backward_ms is None:
            print(f"{r.arm:16}{chunk:>8}  skipped: {r.skipped}")
            continue
        total = r.forward_ms + r.backward_ms
        # Three products are required (two with a frozen weight); recomputed ones do not count as work.
        rate = flops * (2 if "frozen" in r.arm else 3) / total / 1e9
        print(
            f"{r.arm:16}{chunk:>8}{r.forward_ms:>12.1f}{r.backward_ms:>13.1f}{total:>11.1f}{rate:>9.2f}{r.peak_mib:>10.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16_384, help="completion tokens of a micro batch")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary size")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="dtype of rows and weight")
    parser.add_argument("--entropy", action="store_true", help="also compute entropies and their gradients")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="rows per chunk to measure besides auto")
    parser.add_argument("--repeats", type=int, default=5, help="measured passes per arm; the median is reported")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = make_inputs(arguments, device)
    auto = rows_per_chunk(arguments.rows, arguments.vocab, inputs.rows.dtype, inputs.rows.is_cuda)
    results = [measure("products", auto, products(inputs, auto), inputs, arguments.repeats)]
    reason = too_large_for_cpu(arguments)
    if reason is None:
        initialize_megatron()
        results.append(measure("ms-swift", None, ms_swift(inputs), inputs, arguments.repeats))
        dist.destroy_process_group()
    else:
        results.append(Result("ms-swift", None, None, None, None, reason))
    for chunk in [auto, *arguments.chunks]:
        name = "head, auto" if chunk == auto else "head"
        results.append(measure(name, chunk, head(inputs, chunk), inputs, arguments.repeats))
    results.append(measure("head, frozen", auto, frozen_head(inputs, auto), inputs, arguments.repeats))

    name = torch.cuda.get_device_name() if inputs.rows.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{arguments.rows} rows, hidden {arguments.hidden}, vocabulary {arguments.vocab}, {arguments.dtype}"
          f"{', with entropy' if arguments.entropy else ''}; {name}, torch {torch.__version__}")  # fmt: skip
    print_table(results, flops=2.0 * arguments.rows * arguments.hidden * arguments.vocab)
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        report = {"settings": settings, "device": name, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**report, "results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
