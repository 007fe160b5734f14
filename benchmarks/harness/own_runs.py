"""Sections of benchmarks/results/own.md about runs of this package that are compared with each other, by their names.

two-colocated-MODEL-COMPLETIONS   both GPUs train and generate; with four- or eight- all do
two-server-MODEL-COMPLETIONS      one trains, a server on the other one generates the next rollout; with four- or eight-
                                  half of them do
dpN-MODEL, tpN-MODEL, ppN-MODEL   a layout of N GPUs, with as many completions for each GPU as dp1-MODEL
ppN-MODEL-last-M                  the same with M layers on the last stage of the pipeline
sync-MODEL                        a trainer and a server on another GPU
NAME-fp8                          vLLM in 8 bits, against NAME
NAME-epN                          the train phase with the experts of a layer on N GPUs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .cells import percent
from .markdown import table
from .planned import flag
from .results import Measured, Run

AHEAD = """\
## A server ahead of training

Half of two or four GPUs train while a server on the others generates the next rollout (`--async_generate true`),
against colocated data-parallel ranks on all of them, with the same completions in a step. A server has an engine on
each of its GPUs. *Waiting* is what the trainer waits for completions.
"""
RANKS = """\
## Layouts of one model

DP, TP (with SP) and PP on several GPUs, each GPU with as many completions. With *last-N* the last stage of a pipeline
has N layers, and the others share the rest. *Cost* is the time of the train phase over that of one GPU.
"""
SYNC = """\
## Weight sync to a server on another GPU

Median seconds from the trainer's weights to the server's, and of the check after it. Adapters are merged into the
weights, and all of them are sent.
"""
EIGHT_BITS = """\
## Rollouts in FP8

`--rollout_quantization fp8` with the correction that it needs, against bf16 without one, both colocated. The weight
sync quantizes.
"""

APART = """\
## Experts on several GPUs

The train phase with `--expert_model_parallel_size`, which divides the experts of a layer over the GPUs. The MFU is by
active parameters. Routers have random weights, except in runs with `even` in their name, whose choices are random.
"""


def sections_of_own_runs(runs: Sequence[Run]) -> list[str]:
    by_name = {run.name: run for run in runs}
    syncs = [_ours(run) for name, run in by_name.items() if name.startswith("sync-")]
    precisions = [
        (_ours(by_name[bf16]), _ours(run))
        for name, run in by_name.items()
        if "-fp8" in name and (bf16 := name.replace("-fp8", "")) in by_name
    ]
    apart = [_ours(run) for name, run in by_name.items() if run.kind == "train" and re.search(r"-ep\d+(-|$)", name)]
    tables = {
        AHEAD: ahead(runs),
        RANKS: costs_of_ranks(runs),
        SYNC: _syncs(syncs),
        EIGHT_BITS: _in_8_bits(precisions),
        APART: _experts_apart(apart),
    }
    return [text for section in tables.items() for text in section]


def ahead(runs: Sequence[Run], without: Sequence[str] = ()) -> str:
    """Return the table of servers that generate ahead of training, against colocated ranks."""
    by_name = {run.name: run for run in runs}
    pairs = [
        (_ours(by_name[colocated]), _ours(run))
        for name, run in by_name.items()
        if re.match("(two|four|eight)-server-", name)
        and (colocated := name.replace("-server-", "-colocated-")) in by_name
    ]
    return _ahead(pairs, without)


def costs_of_ranks(runs: Sequence[Run]) -> str:
    """Return the table of layouts on several GPUs, against the same model on one."""
    by_name = {run.name: run for run in runs}
    ranks = [
        (_ours(by_name[one]), _ours(run))
        for name, run in by_name.items()
        if re.match(r"[dtp]p\d+-", name) and (one := _on_one_gpu(name)) in by_name
    ]
    return _costs_of_ranks(ranks)


def _on_one_gpu(name: str) -> str:
    return re.sub(r"^[dtp]p\d+", "dp1", re.sub(r"-last-\d+", "", name))


def _ours(run: Run) -> Measured:
    best = run.best("ours")
    assert best is not None, f"{run.name} has no measured step of this package"
    return best


def _ahead(pairs: Sequence[tuple[Measured, Measured]], without: Sequence[str]) -> str:
    columns: dict[str, Callable[[tuple[Measured, Measured]], str]] = {
        "run": lambda pair: pair[1].run.name,
        "completions": lambda pair: str(pair[1].run.workload["completions"]),
        "colocated": lambda pair: f"{pair[0].median:.2f} s",
        "its vLLM during training": lambda pair: _vllm_state(pair[0].run),
        "generation / train phase": lambda pair: f"{pair[0].phase('generation'):.2f} / {pair[0].train_median:.2f} s",
        "server ahead": lambda pair: f"{pair[1].median:.2f} s",
        "waiting / train phase": lambda pair: f"{pair[1].phase('generation'):.2f} / {pair[1].train_median:.2f} s",
        "ratio": lambda pair: f"**{pair[0].median / pair[1].median:.2f}**",
    }
    return table(columns, pairs, without)


def _vllm_state(run: Run) -> str:
    return "awake" if flag(run.flags, "sleep_level") in (None, "0") else "asleep"


def _costs_of_ranks(pairs: Sequence[tuple[Measured, Measured]]) -> str:
    columns: dict[str, Callable[[tuple[Measured, Measured]], str]] = {
        "run": lambda pair: pair[1].run.name,
        "GPUs": lambda pair: str(pair[1].run.ranks),
        "train phase": lambda pair: f"{pair[1].train_median:.3f} s",
        "tokens/s/device": lambda pair: f"{pair[1].tokens_per_second_per_device:,.0f}",
        "cost": lambda pair: f"{pair[1].train_median / pair[0].train_median:.3f}",
    }
    return table(columns, pairs)


def _syncs(rows: Sequence[Measured]) -> str:
    columns: dict[str, Callable[[Measured], str]] = {
        "run": lambda row: row.run.name,
        "sync": lambda row: f"{row.phase('weight_sync'):.3f} s",
        "check": lambda row: f"{row.phase('sync_check'):.3f} s",
        "goal": lambda row: row.run.goal,
    }
    return table(columns, rows)


def _experts_apart(rows: Sequence[Measured]) -> str:
    columns: dict[str, Callable[[Measured], str]] = {
        "run": lambda row: row.run.name,
        "setting": lambda row: row.setting,
        "completions": lambda row: str(row.run.workload["completions"]),
        "train phase": lambda row: f"{row.train_median:.2f} s",
        "tokens/s/device": lambda row: f"{row.tokens_per_second_per_device:,.0f}",
        "MFU": lambda row: percent(row.mfu),
        "MFU as verl counts": lambda row: percent(row.mfu_as_verl_counts),
        "peak GB": lambda row: f"{row.peak_gb:.1f}",
    }
    return table(columns, rows)


def _in_8_bits(pairs: Sequence[tuple[Measured, Measured]]) -> str:
    def phases(side: Measured) -> str:
        return f"{side.phase('generation'):.2f} / {side.phase('weight_sync'):.3f} s"

    columns: dict[str, Callable[[tuple[Measured, Measured]], str]] = {
        "run": lambda pair: pair[1].run.name,
        "bf16": lambda pair: f"{pair[0].median:.2f} s",
        "its generation / weight sync": lambda pair: phases(pair[0]),
        "FP8": lambda pair: f"{pair[1].median:.2f} s",
        "generation / weight sync": lambda pair: phases(pair[1]),
        "ratio": lambda pair: f"**{pair[0].median / pair[1].median:.2f}**",
    }
    return table(columns, pairs)
