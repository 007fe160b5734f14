"""benchmarks/results/eight.md: forecasts for a node, and how near those for two and four GPUs were."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.node.compare import (
    FORECASTS,
    PEAK_BOUND,
    TIME_BOUND,
    compared,
    comparison,
    forecast_table,
    read_forecasts,
)

PAGE = Path("benchmarks/results/eight.md")
_INTRODUCTION = f"""\
# One node of eight GPUs

<!-- Written by `python -m benchmarks.bench report` from {FORECASTS}. Do not edit: a test compares it. -->

**Nothing here was measured on eight GPUs.** The first table has forecasts: the memory plan and the guess of a step that
`--check true` makes for the flags of each case, with the true lengths of its completions. No figure is extrapolated
from measured ones. `python -m benchmarks.eight run --gpus 8 --out benchmarks/h200` measures the cases, and
`python -m benchmarks.eight compare` compares both. `benchmarks/harness/node/cases.py` has the flags of each case, and
why.

* The cases: all weights of 8B, DP 8 and TP 2 x DP 4, with engines of one and of two ranks (`vtp2`). All weights of
  30B-A3B with the settings of templates/moe_full.sh. Adapters of Qwen3.5-35B-A3B, colocated, and with servers on half
  of the GPUs ahead of trainers on the others. Adapters of Qwen3-Omni with an image in each prompt. The weight sync from
  all ranks to as many servers. The train phase of adapters of 8B by data parallelism.
* ms-swift's own trainer runs in turns with `step-full-8b-8` and `step-full-30b-template-ep8`. `--check` plans nothing
  for it.
* Names end with the GPUs of the case. Cases for four and two GPUs are the half and the quarter, with as many
  completions for each GPU.
* *GB*: peaks of a GPU, with CUDA, NCCL and, in the train phase, what a vLLM that sleeps keeps. *Fits*: below 96 % of
  150.1 GB (H200) or 85 GB (H100), in every phase.
* The guess is too low for mixtures of experts in small micro batches: with all weights of 30B-A3B on four GPUs it was
  half of the measured train phase. Random routers read fewer experts in decoding than the guess assumes.
* A forecast of a step leaves weight sync, offloading and the optimizer out. Next to servers it is the train phase
  alone. In `sync-` cases GPUs also have servers of 26 GB each, which the forecast does not count.

## Forecasts
"""
_MEASURED = f"""
## How good forecasts have been

The same forecasts for every setting of this package that was measured on two and four H200. The goals are
{PEAK_BOUND:.0%} of the peak that PyTorch allocated in the train phase, and {TIME_BOUND:.0%} of the time.
"""


def text_of(repository: Path) -> str:
    """Return the page. A case that was measured appears in the second table as well."""
    cases, measured = read_forecasts(repository, "cases"), read_forecasts(repository, "measured")
    rows = compared([*measured, *cases], repository / "benchmarks" / "h200")
    peaks = sum(abs(row.peak_ratio - 1) <= PEAK_BOUND for row in rows)
    times = sum(abs(row.time_ratio - 1) <= TIME_BOUND for row in rows)
    near = f"Of {len(rows)}, {peaks} peaks and {times} times are that near.\n"
    return "\n".join([_INTRODUCTION, forecast_table(cases), _MEASURED, near, comparison(rows)])
