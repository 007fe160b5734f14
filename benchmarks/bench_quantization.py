"""Measure what quantized weights save in generation: the same completions with bf16 and with FP8.

    python -m benchmarks.bench_quantization --json benchmarks/h200/parts/fp8.json --shape 8b

vLLM generates with random weights that it draws itself, in a process for each kind of weights, and quantizes them when
it loads them, with and without log-probs of the sampled tokens in turns. Every completion has the same length, so kinds
differ in speed alone. `gain` in the file compares median times with those of the first kind without log-probs: a
policy that trains on completions of other weights than its own needs the log-probs, for the correction, and one that
generates with its own weights does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.checkpoints import made_checkpoint
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.processes import devices_locked
from benchmarks.harness.workload import SHAPES

NONE = "none"  # weights as they are
MARK = "SECONDS "
PLAIN, WITH_LOGPROBS = "without log-probs", "with log-probs"
Rounds = dict[str, list[float]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the results")
    add("--shape", choices=SHAPES, default="8b", help="sizes of the model")
    add("--kinds", nargs="+", default=[NONE, "fp8"], help="values of vLLM's quantization, and none")
    add("--completions", type=int, default=128, help="completions at one time")
    add("--tokens", type=int, default=512, help="tokens of a completion")
    add("--prompt-tokens", type=int, default=128, help="tokens of a prompt")
    add("--rounds", type=int, default=3, help="measured rounds, after one to warm up")
    add("--memory", type=float, default=0.8, help="share of the GPU's memory")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--timeout", type=float, default=300, help="seconds for one kind")
    add("--work", type=Path, default=REPOSITORY / "runs" / "quantization", help="folder for the model")
    add("--only", help=argparse.SUPPRESS)  # the kind that a started process measures
    return parser.parse_args()


def generate(args: argparse.Namespace, model: Path) -> Rounds:
    """Return the seconds of each round, of both ways."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), load_format="dummy", quantization=None if args.only == NONE else args.only,
              max_model_len=args.prompt_tokens + args.tokens, max_num_seqs=args.completions, seed=0,
              gpu_memory_utilization=args.memory, enable_prefix_caching=False, enforce_eager=args.eager,
              disable_log_stats=True)  # fmt: skip
    prompts = [{"prompt_token_ids": [10 + i % 200] * args.prompt_tokens} for i in range(args.completions)]
    seconds: Rounds = {PLAIN: [], WITH_LOGPROBS: []}
    for _ in range(args.rounds + 1):
        for way, logprobs in ((PLAIN, None), (WITH_LOGPROBS, 0)):
            sampling = SamplingParams(temperature=1.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False,
                                      logprobs=logprobs)  # fmt: skip
            began = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds[way].append(time.perf_counter() - began)
            assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
    return {way: times[1:] for way, times in seconds.items()}


def measure(kind: str, timeout: float) -> Rounds:
    """Return the rounds of a kind, measured by a process of its own; none if it failed."""
    command = [sys.executable, "-m", "benchmarks.bench_quantization", *sys.argv[1:], "--only", kind]
    try:
        with devices_locked():
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, cwd=REPOSITORY, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {}
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1]) if lines else {}


def main() -> int:
    args = parse()
    args.work, args.json = args.work.resolve(), args.json.resolve()
    model = made_checkpoint(args.work, args.shape, with_weights=False)
    if args.only is not None:
        print(MARK + json.dumps(generate(args, model)), flush=True)
        return 0
    device, versions = machine(revision(), PACKAGES)
    seconds: dict[str, Rounds] = {}
    for kind in args.kinds:
        seconds[kind] = measure(kind, args.timeout)
        print(kind, seconds[kind], flush=True)
        first = seconds[args.kinds[0]]
        gains = {
            name: {way: median(first[PLAIN]) / median(times) for way, times in rounds.items()}
            for name, rounds in seconds.items()
            if first
        }
        workload = {name: getattr(args, name) for name in ("shape", "completions", "tokens", "prompt_tokens")}
        report: dict[str, Any] = {"device": device, "versions": versions, **workload, "seconds": seconds, "gain": gains}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(seconds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
