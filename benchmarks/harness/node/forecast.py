"""Forecast memory and time of a benchmark's step with the plan of `--check true`, for the lengths of its completions.

Flags are parsed as by a rank of the run, so a command that would be refused has no forecast.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from unittest.mock import patch

from benchmarks import bench
from benchmarks.harness.node.cases import NODES, Case, cases
from benchmarks.harness.node.figures import Forecast
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.processes import Setting
from benchmarks.harness.results import SHARED, Process, Run
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.workload import write_dataset
from swift_megatron_grpo.cli.check.check import Inputs, parse_flags
from swift_megatron_grpo.cli.check.estimate import Estimate, estimate
from swift_megatron_grpo.cli.check.model import read_model
from swift_megatron_grpo.cli.check.rows import read_rows
from swift_megatron_grpo.cli.estimate.advice import MARGIN
from swift_megatron_grpo.cli.estimate.memory import ASLEEP_BYTES
from swift_megatron_grpo.runtime.gpus import find_gpu

CARDS = ("H200-141G", "H100-80G")  # the first has measurements


def forecasts(
    name: str, args: argparse.Namespace, setting: Setting, ranks: int, cards: Sequence[str]
) -> Iterator[Forecast]:
    """Forecast a setting of this package on each card. `args`: of bench.py.

    Raises ValueError if the run would be refused.
    """
    model, template_tokens = bench.make_model(args)
    workload, shape = bench.workload_of(args), SHAPES[args.shape]
    texts = workload.prompt_tokens(template_tokens + 8)
    dataset = Path(args.work) / f"{name}.jsonl"
    write_dataset(dataset, texts, template_tokens, shape)
    prompts = [tokens + shape.media_tokens(row) for row, tokens in enumerate(texts)]
    flags = bench.common_flags(args, model, dataset, prompts)
    own = ["--reward_funcs", "format", "--train_iters", str(args.steps), "--output_dir", str(args.work), "--check",
           "true"]  # fmt: skip
    lengths = list(chain(*workload.completion_tokens()))
    with _ranks(ranks):
        checked = parse_flags([*flags, *setting.flags, *own])
        rows = read_rows(checked, (inputs := Inputs(checked)).train_rows, inputs.template)
        sizes = read_model(checked.model_dir)
        for card in cards:
            result = estimate(checked, sizes, rows, find_gpu(card), lengths=lengths)
            yield _figures(name, setting, ranks, card, result, generates=args.kind == "step")


def forecast_of_run(run: Run, process: Process, work: Path) -> Forecast:
    """Forecast a measured setting of this package from its result file alone."""
    workload = run.workload
    arguments = [run.kind, "--json", f"{run.name}.json", "--work", str(work), "--shape", workload["shape"],
                 "--completions", str(workload["completions"]), "--generations", str(workload["generations"]),
                 "--lengths", workload["lengths"], "--prompts", workload["prompt_lengths"], "--random-weights",
                 "--flags", shlex.join(run.flags)]  # fmt: skip
    # Runs that are older than the default of this flag do not have it.
    repeated = () if SHARED in process.setting else ("--share_prompts", "false")
    setting = Setting(process.arm, process.setting, (*process.flags, *repeated))
    [found] = forecasts(run.name, bench.parse(arguments), setting, run.ranks, CARDS[:1])
    return found


def _figures(name: str, setting: Setting, ranks: int, card: str, result: Estimate, generates: bool) -> Forecast:
    """Return the figures of an estimate; without the engine if completions are canned."""
    has_engine = generates and result.engine is not None
    fullest = max(result.memory, key=lambda rank: rank.phases["train"])
    trained = fullest.states + fullest.activations + fullest.in_backward
    awake = fullest.vllm if has_engine and result.engine is not None and not result.engine.sleep_level else 0.0
    asleep = ASLEEP_BYTES if has_engine and not awake else 0.0
    phases = {phase: max(rank.phases[phase] for rank in result.memory) for phase in fullest.phases}
    train = trained + awake + asleep + fullest.outside
    room = find_gpu(card).memory_bytes * (1 - MARGIN)
    return Forecast(
        name,
        setting.name,
        ranks,
        card,
        weight_sync_gb=_gb(phases["weight sync"]) if has_engine else None,
        generation_gb=_gb(phases["generation"]) if has_engine else None,
        train_gb=_gb(train),
        train_in_pytorch_gb=_gb(trained + awake),
        fits=result.fits and result.engine_fits if has_engine else train <= room,
        train_seconds=round(result.train_seconds, 2),
        generation_seconds=round(result.generation_seconds, 2) if has_engine and result.generation_seconds else None,
    )


def _gb(number: float) -> float:
    return round(number / 1e9, 1)


@contextmanager
def _ranks(number: int) -> Iterator[None]:
    """Let flags be parsed as by the first of so many ranks of a machine."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    with patch.dict(os.environ, ranks):
        yield


def forecast_all(work: Path) -> dict[str, list[Forecast]]:
    """Forecast all cases, and this package's settings that several H200 have measured."""
    work.mkdir(parents=True, exist_ok=True)
    runs = [Run.read(file) for file in sorted((REPOSITORY / "benchmarks" / "h200").glob("*.json"))]
    measured = [(run, process) for run in runs if run.ranks > 1 for process in distinct(run)]
    return {
        "cases": [one for gpus in NODES for case in cases(gpus) for one in forecasts_of(case, work)],
        "measured": [forecast_of_run(run, process, work) for run, process in measured],
    }


def distinct(run: Run) -> list[Process]:
    """Return the processes of this package that were measured, one of each setting."""
    measured = {process.setting: process for process in run.processes if process.arm == "ours" and process.steps}
    return list(measured.values())


def forecasts_of(case: Case, work: Path) -> Iterator[Forecast]:
    """Yield the forecast of every setting of this package, on every card."""
    urls = ["http://127.0.0.1:8000"]  # a check calls no server
    args = bench.parse([*case.arguments(urls=urls), "--json", f"{case.name}.json", "--work", str(work)])
    settings, ranks = bench.settings_of(args)
    for setting in settings:
        if setting.arm == "ours":
            yield from forecasts(case.name, args, setting, ranks, CARDS)
