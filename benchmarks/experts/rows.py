"""The measurements of one way: its errors, a row for each size, and the kernels of the first size.

Each is a dict with one of `row`, `failure`, `errors`, `errors_with_empty` and `kernels`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.experts.errors import errors_of
from benchmarks.experts.inputs import Loads, Settings, Sizes, draw_routing, draw_rows, draw_weights, loads_of
from benchmarks.experts.timing import Pass, kernels_of, timed
from benchmarks.experts.ways import Block, build_block

EMPTY = (0, 5, 15)  # experts without tokens


def rows_of_a_way(way: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a way, each as soon as it is known."""
    device = settings.device
    small = settings.sizes(16, settings.error_tokens)
    yield attempt("errors", lambda: {"errors": errors_of(way, small, settings.unevenness, (), device)})
    profiled: Callable[[], dict[str, Any]] | None = None
    for experts, trained in product(settings.experts, (True, False)):
        all_sizes = [settings.sizes(experts, tokens) for tokens in settings.tokens]
        try:
            block = build_block(way, draw_weights(all_sizes[0], device), trained)
        except Exception as error:
            yield failure("build", error)
            continue
        for sizes in all_sizes:
            yield attempt(f"{sizes}, trained={trained}", partial(measured_row, sizes, trained, block, settings))
        if not settings.dry and trained and profiled is None:
            profiled = partial(kernels_row, all_sizes[0], block, settings)
    if profiled is not None:
        yield attempt("kernels", profiled)
    # Last, because a kernel that fails on an expert without tokens may leave the process unusable.
    yield attempt("errors", lambda: {"errors_with_empty": errors_of(way, small, settings.unevenness, EMPTY, device)})


def attempt(what: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what the function returns, or why it failed."""
    try:
        return function()
    except Exception as error:
        return failure(what, error)


def failure(what: str, error: Exception) -> dict[str, Any]:
    where = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).strip().splitlines()[:3])[:400]
    return {"failure": f"{what}: {type(error).__name__}: {reason} ({Path(where.filename).name}:{where.lineno})"}


def measured_row(sizes: Sizes, trained: bool, block: Block, settings: Settings) -> dict[str, Any]:
    measured, loads = pass_of(sizes, block, settings)
    times = timed(measured, settings.repeats, not settings.dry)
    flops = 6.0 * sizes.rows * sizes.hidden * sizes.ffn * (3 if trained else 2)
    on_gpu = None if times["gpu_forward_ms"] is None else times["gpu_forward_ms"] + (times["gpu_backward_ms"] or 0)
    row = {
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


def kernels_row(sizes: Sizes, block: Block, settings: Settings) -> dict[str, Any]:
    return {"kernels": kernels_of(pass_of(sizes, block, settings)[0])}


def pass_of(sizes: Sizes, block: Block, settings: Settings) -> tuple[Pass, Loads]:
    """Return a forward and backward of the block, and the loads of its experts."""
    device = settings.device
    loads = loads_of(draw_routing(sizes, settings.unevenness))
    x, upstream = (draw_rows(sizes.rows, sizes.hidden, device, seed) for seed in (1, 2))
    x.requires_grad_()
    return Pass(lambda: [block(x, loads)], [upstream], [x]), loads
