"""Measure the experts of one MoE layer, forward and backward: Transformer Engine against one kernel per product.

    python -m benchmarks.bench_experts --json experts.json          on a GPU, in about a minute
    python -m benchmarks.bench_experts --json experts.json --dry    on a CPU, with tiny sizes

A block is fc1, SwiGLU and fc2 on tokens that are sorted by expert; every token goes to --topk experts, which are drawn
from a seed and unevenly loaded. Each way runs in its own process and starts from the same weights and gradients:

    te           Transformer Engine's GroupedLinear, a weight per expert; cuBLAS adds to fp32 gradients
    te cutlass   the same with NVTE_USE_CUTLASS_GROUPED_GEMM=1
    stacked      one product for all experts, as --fast_kernels has it: bf16 weight gradients are added to fp32 ones
    parameters   the same with a gradient per expert for the hooks of Megatron's DDP, as with --overlap_grad_reduce
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.experts.inputs import Settings
from benchmarks.experts.rows import rows_of_a_way
from benchmarks.experts.tokens import TOKENS, rows_of_tokens
from benchmarks.experts.ways import CUTLASS, WAYS
from benchmarks.harness.paths import REPOSITORY, absolute

MARK, READY = "ROW ", "READY"
COLUMNS = {
    "host_forward_ms": "host fwd",
    "host_backward_ms": "host bwd",
    "gpu_forward_ms": "gpu fwd",
    "gpu_backward_ms": "gpu bwd",
    "loop_ms": "loop",
    "tflops": "TFLOP/s",
    "tflops_in_loop": "in loop",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=absolute, required=True, help="file for the results")
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
    if args.dry:
        args.experts, args.tokens, args.hidden, args.ffn, args.error_tokens = [16], [32, 64], 32, 16, 64
        args.topk, args.repeats = 4, 2
    elif not torch.cuda.is_available():
        parser.error("this machine has no GPU; use --dry")
    args.ways = args.ways or [way for way in (*WAYS, TOKENS) if args.dry or way != "loop"]
    return args


def main() -> int:
    args = parse()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if args.only is not None:
        serve(args.only, settings)
        return 0
    return measure(args.json, args.ways, args.deadline, settings)


# ------------------------------------------------------------------------------------------ one way, in its own process


def serve(way: str, settings: Settings) -> None:
    """Measure a way and print its rows; begin when the parent asks for it."""
    if settings.dry:
        from swift_megatron_grpo.platforms.cpu import activate

        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        activate()
    elif way != TOKENS:
        import transformer_engine.pytorch  # noqa: F401
    if way == TOKENS:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # starting more takes longer than they save here
        import megatron.core.transformer.moe.moe_utils  # noqa: F401
    print(READY, flush=True)
    sys.stdin.readline()
    for row in rows_of_tokens(settings) if way == TOKENS else rows_of_a_way(way, settings):
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


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
    with suppress(OSError):  # if it has ended, its exit code is reported below
        process.stdin.write("\n")
        process.stdin.flush()
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


# ----------------------------------------------------------------------------------------------------------- the report


def measure(path: Path, ways: list[str], deadline: float, settings: Settings) -> int:
    """Measure the ways one after the other, print their rows and write them to the file."""
    began = time.monotonic()
    device, versions = machine(revision(), PACKAGES)
    report: dict[str, Any] = {"device": device, "versions": versions, "settings": asdict(settings), "ways": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    processes = {way: start(way) for way in ways}
    try:
        # Imports of one process would disturb the host times of another, so all are ready before the first begins.
        waiting = threading.Timer(deadline / 2, kill, [processes.values()])
        waiting.start()
        printed = {way: until_ready(process) for way, process in processes.items()}
        waiting.cancel()
        titles = "".join(f"{title:>10}" for title in COLUMNS.values())
        print(f"{'way':12}{'kind':18}{'e':>4}{'tokens':>7}{titles}", flush=True)
        for way, process in processes.items():
            way_began = time.monotonic()
            entry: dict[str, Any] = {"rows": [], "failures": []}
            report["ways"][way] = entry
            for found in rows_from(process, printed[way], deadline - (time.monotonic() - began)):
                for key, value in found.items():
                    if key in ("row", "failure"):
                        entry[key + "s"].append(value)
                    else:
                        entry[key] = value
                entry["seconds"] = round(time.monotonic() - way_began, 1)
                print_line(way, found)
                write(path, report)
    finally:
        kill(processes.values())
    report["seconds"] = round(time.monotonic() - began, 1)
    write(path, report)
    failed = [way for way, entry in report["ways"].items() if entry["failures"]]
    print(f"{report['seconds']} s; failures: {', '.join(failed) or 'none'}", flush=True)
    return 0 if all(entry["rows"] for entry in report["ways"].values()) else 1


def print_line(way: str, found: dict[str, Any]) -> None:
    """Print a row of the table, or the start of anything else."""
    row = found.get("row")
    if row is None:
        print(f"{way:12} {json.dumps(found)[:300]}", flush=True)
        return
    numbers = "".join(f"{'' if row.get(name) is None else format(row[name], '.3f'):>10}" for name in COLUMNS)
    kind = row.get("weights") or row["name"]
    print(f"{way:12}{kind:18}{row['experts']:>4}{row['tokens']:>7}{numbers}", flush=True)


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file as a whole, so that it is complete at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
