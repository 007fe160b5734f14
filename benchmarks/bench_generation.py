"""Measure what settings of vLLM change in generation: the same completions with each of them.

    python -m benchmarks.bench_generation --json benchmarks/h200/parts/fp8.json --variants default fp8_per_channel

vLLM generates with random weights that it draws itself, in a process for each variant, as in a training process: the
engine has no process of its own, and what this package speeds up in vLLM is installed. Rounds with and without
log-probs take turns. Every completion has the same length, and no two rounds share a prompt, so variants differ
in speed alone. `gain` in the file compares median times with those of the first variant without log-probs: a policy
that trains on completions of other weights than its own needs the log-probs, for the correction, and one that generates
with its own weights does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.free_gpus import wait_until_free
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import devices_locked, exit_at_sigterm, visible_devices
from benchmarks.harness.shapes import SHAPES

MARK = "RESULT "
PLAIN, WITH_LOGPROBS = "without log-probs", "with log-probs"
PROFILED_TOKENS = 64
SOME_IDS = 200  # every vocabulary has as many
# What the results record of the arguments: runs that differ in any of them do not compare.
WORKLOAD = ("shape", "completions", "group_size", "tokens", "prompt_tokens", "rounds", "memory", "dtype", "eager")


@dataclass(frozen=True, slots=True)
class Variant:
    """Arguments of vLLM's engine, of its compilation, and variables of its process."""

    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    compilation: dict[str, Any] = field(default_factory=dict)


GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without torch.compile, as in most runs of bench.py

VARIANTS = {
    "default": Variant(),
    "fp8_per_tensor": Variant({"quantization": "fp8_per_tensor"}),
    "fp8_per_channel": Variant({"quantization": "fp8_per_channel"}),
    "fp8_per_block": Variant({"quantization": "fp8_per_block"}),
    "graphs_alone": Variant(compilation=GRAPHS_ALONE),
    "fp8_graphs_alone": Variant({"quantization": "fp8_per_channel"}, compilation=GRAPHS_ALONE),
    "no_prefix_caching": Variant({"enable_prefix_caching": False}),
    # vLLM's second model runner has no cascade attention, so the first one is measured with it and without.
    "first_runner": Variant(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "cascade": Variant({"disable_cascade_attn": False}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    # On Hopper the default is version 3 of flash attention, whose tiles suit many query heads per key head.
    "flash_attention_2": Variant({"attention_config": {"flash_attn_version": 2}}),
    "one_split": Variant({"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}}),
    "triton_attention": Variant({"attention_backend": "TRITON_ATTN"}),
    "flashinfer": Variant({"attention_backend": "FLASHINFER"}),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=absolute, required=True, help="file for the results")
    add("--shape", choices=SHAPES, default="8b", help="sizes of the model")
    add("--variants", nargs="+", choices=VARIANTS, default=["default", "fp8_per_channel"], help="what to compare")
    add("--completions", type=int, default=128, help="completions at one time")
    add("--group-size", type=int, default=1, help="completions of a prompt")
    add("--tokens", type=int, default=512, help="tokens of a completion")
    add("--prompt-tokens", type=int, default=128, help="tokens of a prompt")
    add("--rounds", type=int, default=3, help="measured rounds, after one to warm up")
    add("--memory", type=float, default=0.8, help="share of the GPU's memory")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="precision of the weights")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--profile", action="store_true", help="also record kernels and host functions of short rounds")
    add("--timeout", type=float, default=300, help="seconds for one variant")
    add("--work", type=absolute, default=REPOSITORY / "runs" / "generation", help="folder for the model")
    add("--only", help=argparse.SUPPRESS)  # the variant that a started process measures
    args = parser.parse_args(arguments)
    compiled = [name for name in args.variants if VARIANTS[name].compilation]
    if args.eager and compiled:
        parser.error(f"--eager turns off what {' and '.join(compiled)} would set of vLLM's compilation; leave one out")
    return args


def prompts_of(args: argparse.Namespace, number: int) -> list[dict[str, list[int]]]:
    """Return the prompts of a round. Two tokens at their beginning number them, so that nothing is cached before."""
    numbers = [number * args.completions + place // args.group_size for place in range(args.completions)]
    filler = [10] * (args.prompt_tokens - 2)
    return [{"prompt_token_ids": [10 + n % SOME_IDS, 10 + n // SOME_IDS % SOME_IDS, *filler]} for n in numbers]


def graph_sizes(completions: int) -> list[int]:
    """Return the numbers of requests that get a CUDA graph. Fewer than vLLM's default, whose capture takes a minute."""
    return [*(2**power for power in range(completions.bit_length()) if 2**power < completions), completions]


def generate(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the seconds of each round, of both ways, and the profile if it is asked for."""
    from vllm import LLM, SamplingParams

    from benchmarks.harness.busy_time import functions_of, kernels_of
    from swift_megatron_grpo.generation.vllm.fast_logprobs import speed_up_logprobs
    from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding

    speed_up_logprobs()
    variant = VARIANTS[args.only]
    settings = {"max_model_len": args.prompt_tokens + args.tokens, "max_num_seqs": args.completions, "seed": 0,
                "gpu_memory_utilization": args.memory, "enforce_eager": args.eager, "load_format": "dummy",
                "dtype": args.dtype, "disable_log_stats": True,
                "compilation_config": {"cudagraph_capture_sizes": graph_sizes(args.completions),
                                       **variant.compilation}}  # fmt: skip
    llm = LLM(str(model), **settings, **variant.engine)
    speed_up_decoding(llm.llm_engine)
    rounds = iter(range(10**9))

    def run(tokens: int, logprobs: int | None) -> None:
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                                  logprobs=logprobs, flat_logprobs=True)  # fmt: skip
        outputs = llm.generate(prompts_of(args, next(rounds)), sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)

    seconds: dict[str, list[float]] = {PLAIN: [], WITH_LOGPROBS: []}
    for _ in range(args.rounds + 1):
        for way, logprobs in ((PLAIN, None), (WITH_LOGPROBS, 0)):
            began = time.perf_counter()
            run(args.tokens, logprobs)
            seconds[way].append(time.perf_counter() - began)
    result: dict[str, Any] = {"seconds": {way: times[1:] for way, times in seconds.items()}}
    if args.profile:
        short = partial(run, min(args.tokens, PROFILED_TOKENS), 0)
        result["profile"] = {**kernels_of(short, min(args.tokens, PROFILED_TOKENS)), "host": functions_of(short)}
    return result


def measure(variant: str, timeout: float) -> dict[str, Any]:
    """Return what a process of its own has measured of a variant; nothing if it failed."""
    command = [sys.executable, "-m", "benchmarks.bench_generation", *sys.argv[1:], "--only", variant]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **VARIANTS[variant].environment}
    try:
        with devices_locked():
            if torch.cuda.is_available():
                wait_until_free(visible_devices()[:1])
            done = subprocess.run(
                command, text=True, stdout=subprocess.PIPE, cwd=REPOSITORY, timeout=timeout, env=environment
            )
    except subprocess.TimeoutExpired:
        return {}
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1]) if lines else {}


def gains(measured: dict[str, dict[str, Any]], first: str) -> dict[str, dict[str, float]]:
    """Return how many times as fast each variant is, in both ways, as the first one without log-probs."""
    if not measured[first]:
        return {}
    base = median(measured[first]["seconds"][PLAIN])
    return {
        name: {way: base / median(times) for way, times in result["seconds"].items()}
        for name, result in measured.items()
        if result
    }


def main() -> int:
    args = parse()
    model = made_checkpoint(args.work, args.shape, with_weights=False)
    if args.only is not None:
        print(MARK + json.dumps(generate(args, model)), flush=True)
        os._exit(0)  # vLLM's threads may outlive their engine
    exit_at_sigterm()
    device, versions = machine(revision(), PACKAGES)
    workload = {name: getattr(args, name) for name in WORKLOAD}
    measured: dict[str, dict[str, Any]] = {}
    for variant in args.variants:
        measured[variant] = measure(variant, args.timeout)
        print(variant, measured[variant].get("seconds"), flush=True)
        report = {"device": device, "versions": versions, **workload, "gain": gains(measured, args.variants[0]),
                  "variants": measured}  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(measured.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
