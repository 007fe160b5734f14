"""Measure what verifying drafts costs: a decode step with 1, 2 and 4 more rows of every running request.

    python -m benchmarks.bench_draft_rows --json benchmarks/h200/parts/draft-rows.json --shapes 8b 1.7b --limit 400

vLLM generates with random weights that it draws itself, one process for each shape and arm. Drafts cost nothing and are
never accepted (harness/constant_drafts.py), so every step adds one token to each request, whatever its rows. Log-probs
are requested, as in training. Depths take turns within one batch of requests: 40 steps with no drafts, 40 with one of
each request, and so on, several times. A number is the median over steps in milliseconds; `busy_ms` is what kernels
keep the GPU busy for, without gaps in which it waits for the host.

| arm | engine |
| --- | --- |
| `v2` | second model runner without drafts, with vLLM's scheduling and with this package's |
| `v2-drafts` | second model runner, a FULL CUDA graph of every depth, asynchronous scheduling |
| `v1` | first model runner without drafts |
| `v1-drafts-4`, -2, -1 | first model runner, a FULL graph of this depth, no asynchronous scheduling |

`expected_ms` in the file is a bound, written before any measurement: bytes of weights and of keys and values by 4.0
TB/s, or operations by 700 TFLOP/s where those take longer, and 26 bytes of every logit. On an H200, for contexts of
1,000 tokens, without the host and without launches (2 to 3 ms a step in earlier measurements):

| | running | no drafts | 1 | 2 | 4 |
| --- | --- | --- | --- | --- | --- |
{table}

So four drafts of 16 requests should be free with a dense model (limit of the plan: 10 %), and not with experts, because
more rows choose more of them. Runs on a CPU as a trial: `--shapes toy --arms v1 v1-drafts-2 --running 2 4 --steps 6`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.free_gpus import wait_until_free
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.processes import devices_locked, exit_at_sigterm, visible_devices
from benchmarks.harness.shapes import SHAPES, Shape

ARMS = {  # depths that take turns in one engine
    "v2-drafts": (0, 1, 2, 4),
    "v2": (0,),
    "v1": (0,),
    "v1-drafts-4": (4,),
    "v1-drafts-2": (2,),
    "v1-drafts-1": (1,),
}
SETTLE = 5  # steps after a change of depth that are not counted: two are in flight
PROFILED_STEPS = 16
BANDWIDTH, OPERATIONS = 4.0e12, 7.0e14  # bytes and operations of a second that kernels reach on an H200
BYTES_OF_A_LOGIT = 26  # bf16 written, then read and written as fp32 by sampling and log-probs
SOME_IDS = 200  # every vocabulary has as many
SHOWN_LINES = 30  # of the log of an arm that measured nothing
SLACK = 64  # tokens of a request for steps that are not counted and drafts that are accepted by chance
WORKLOAD = ("running", "steps", "rounds", "prompt_tokens", "memory", "eager", "compiled")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    text = (__doc__ or "").format(table=table_of_expectations())
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=absolute, required=True, help="file for the results; written after every arm")
    add("--shapes", nargs="+", choices=SHAPES, default=["8b", "1.7b"], help="sizes of the models")
    add("--arms", nargs="+", choices=ARMS, default=["v2-drafts", "v2"], help="engines to measure")
    add("--running", type=int, nargs="+", default=[16, 64, 128, 8, 32], help="requests at one time, in this order")
    add("--steps", type=int, default=40, help="measured steps of a depth at a time")
    add("--rounds", type=int, default=4, help="times that each depth has its turn")
    add("--prompt-tokens", type=int, default=512, help="tokens of a prompt")
    add("--memory", type=float, default=0.85, help="share of the GPU's memory")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--compiled", action="store_true", help="with torch.compile, which takes a minute more for each engine")
    add("--limit", type=float, default=420, help="seconds for everything; what is left then is not measured")
    add("--arm-limit", type=float, default=150, help="seconds for one arm")
    add("--work", type=absolute, default=REPOSITORY / "runs" / "draft-rows", help="folder for the configurations")
    add("--only", nargs=2, help=argparse.SUPPRESS)  # shape and arm that a started process measures
    add("--part", type=absolute, help=argparse.SUPPRESS)  # file of that process
    return parser.parse_args(arguments)


def expected_ms(shape: Shape, running: int, depth: int, context: int = 1000) -> float:
    """Return the least milliseconds of a decode step on an H200 whose every request verifies `depth` drafts."""
    rows = running * (1 + depth)
    expert = 3 * shape.hidden * shape.ffn  # parameters of one, or of a dense layer's MLP
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    others = shape.layers * attention + shape.vocabulary * shape.hidden
    if shape.experts:  # each row chooses some of a layer's experts, evenly
        chosen = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** rows)
        read, used = others + shape.layers * expert * chosen, others + shape.layers * expert * shape.experts_per_token
    else:
        read = used = others + shape.layers * expert
    weights = max(2 * read / BANDWIDTH, 2 * used * rows / OPERATIONS)
    keys = running * context * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2 / BANDWIDTH
    logits = rows * shape.vocabulary * BYTES_OF_A_LOGIT / BANDWIDTH
    return 1000 * (weights + keys + logits)


def table_of_expectations() -> str:
    rows = [
        (name, running, *(f"{expected_ms(SHAPES[name], running, depth):.1f}" for depth in (0, 1, 2, 4)))
        for name in ("1.7b", "8b", "30b-qwen3-moe")
        for running in (8, 16, 32, 64, 128)
    ]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def graph_sizes(running: list[int], depths: tuple[int, ...]) -> list[int]:
    """Return the numbers of rows that get a CUDA graph: those of every batch that is measured."""
    return sorted({count * (1 + depth) for count in running for depth in depths})


class Decoding:
    """One engine whose requests decode step by step."""

    def __init__(self, args: argparse.Namespace, model: Path, arm: str) -> None:
        from vllm import LLM

        self._depths, most = ARMS[arm], max(args.running)
        self._prompt_tokens = args.prompt_tokens
        turns = args.rounds * (args.steps + SETTLE) + SETTLE + PROFILED_STEPS
        self._tokens = len(self._depths) * turns + SLACK
        graphs = {"cudagraph_capture_sizes": graph_sizes(args.running, self._depths),
                  "cudagraph_mode": "FULL_AND_PIECEWISE" if args.compiled else "FULL_DECODE_ONLY",
                  "mode": 3 if args.compiled else 0}  # fmt: skip
        llm = LLM(str(model), load_format="dummy", dtype="bfloat16" if torch.version.cuda else "float32", seed=0,
                        max_model_len=args.prompt_tokens + self._tokens + SLACK, max_num_seqs=most,
                        gpu_memory_utilization=args.memory, disable_log_stats=True, skip_tokenizer_init=True,
                        enforce_eager=args.eager, enable_prefix_caching=False, logprobs_mode="processed_logprobs",
                        **({} if args.eager else {"compilation_config": graphs}),
                        **speculation(arm, most))  # fmt: skip
        self.engine = llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        self._names = iter(range(10**9))
        self._running: list[str] = []
        self.full_graphs = 0
        if vars(runner).get("cudagraph_manager") is not None:  # the second runner with graphs
            self._count_full_graphs(runner.cudagraph_manager)

    def _count_full_graphs(self, manager: Any) -> None:
        replay = manager.run_fullgraph

        def counted(batch: Any) -> Any:
            self.full_graphs += 1
            return replay(batch)

        manager.run_fullgraph = counted

    def start(self, running: int) -> None:
        """Add requests and decode their prompts. No two prompts begin alike."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for _ in range(running):
            number = next(self._names)
            ids = [10 + number % SOME_IDS, 10 + number // SOME_IDS, *[10] * (self._prompt_tokens - 2)]
            sampling = SamplingParams(temperature=1.0, max_tokens=self._tokens, ignore_eos=True, detokenize=False,
                                      logprobs=0, flat_logprobs=True,
                                      output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
            self._running.append(str(number))
            self.engine.add_request(self._running[-1], {"prompt_token_ids": ids}, sampling)
        while len(self.scheduler.running) < running or not all(r.num_output_tokens for r in self.scheduler.running):
            self.engine.step()

    def end(self) -> None:
        self.engine.abort_request(self._running)
        self._running.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def set_depth(self, depth: int) -> None:
        lookup = self.scheduler.dynamic_sd_lookup
        if lookup is not None:
            lookup[:] = [depth] * len(lookup)

    def steps(self, count: int) -> list[float]:
        """Return the milliseconds of each of `count` steps."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.engine.step()
            times.append(1000 * (time.perf_counter() - began))
        return times

    def tokens(self) -> int:
        return sum(int(request.num_output_tokens) for request in self.scheduler.running)

    def busy_ms(self) -> float | None:
        """Return the milliseconds for which kernels keep the GPU busy in a step; None without a GPU."""
        if not torch.cuda.is_available():
            return None
        from benchmarks.harness.busy_time import kernels_of

        def generate() -> None:
            self.steps(PROFILED_STEPS)
            torch.cuda.synchronize()

        torch.cuda.synchronize()  # a step is always in flight, here and at the end
        return 1000 * float(kernels_of(generate, PROFILED_STEPS)["busy_seconds_per_token"])


def speculation(arm: str, most: int) -> dict[str, Any]:
    """Return the argument of an engine that drafts; nothing for one that does not."""
    depths = ARMS[arm]
    if max(depths) == 0:
        return {}
    if arm.startswith("v1"):
        return {"speculative_config": {"method": "custom_class", "num_speculative_tokens": depths[0],
                                       "model": "benchmarks.harness.constant_drafts.ConstantProposer"}}  # fmt: skip
    # One number of requests for each depth, so that each has graphs; set_depth overrides the table.
    table = [[place, place, depth] for place, depth in enumerate(depths[:-1], 1)] + [[len(depths), most, depths[-1]]]
    return {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": max(depths), "prompt_lookup_max": 2,
                                   "prompt_lookup_min": 2, "num_speculative_tokens_per_batch_size": table}}  # fmt: skip


def measure(args: argparse.Namespace, model: Path, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what is measured of one shape and arm, for each number of running requests and each depth."""
    name, arm = args.only
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arm.startswith("v2") else "0"
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    from swift_megatron_grpo.generation.vllm.fast_logprobs import install_in, speed_up_logprobs
    from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding

    speed_up_logprobs()
    if arm == "v2-drafts":
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        from benchmarks.harness.constant_drafts import install_in_second_runner

        install_in(rejection_sampler)  # log-probs of verified rows by the kernel of the others
        install_in_second_runner()
    began = time.perf_counter()
    decoding = Decoding(args, model, arm)
    startup = time.perf_counter() - began
    scheduler = decoding.scheduler
    ways = {"vllm": (scheduler.schedule, scheduler.update_from_output)}
    if max(ARMS[arm]) == 0 and speed_up_decoding(decoding.engine):
        ways["ours"] = (scheduler.schedule, scheduler.update_from_output)
    for running in args.running:
        for scheduling, (scheduler.schedule, scheduler.update_from_output) in ways.items():
            if time.monotonic() > deadline:
                return
            decoding.start(running)
            for row in in_turns(args, decoding, ARMS[arm]):
                yield {"shape": name, "arm": arm, "scheduling": scheduling, "running": running, "startup_s": startup,
                       "expected_ms": expected_ms(SHAPES[name], running, row["depth"]), **row}  # fmt: skip
            decoding.end()


def in_turns(args: argparse.Namespace, decoding: Decoding, depths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the medians of each depth, after all have had their turns in one batch of requests."""
    times: dict[int, list[list[float]]] = {depth: [] for depth in depths}
    tokens, graphs = dict.fromkeys(depths, 0), dict.fromkeys(depths, 0)
    running = len(decoding.scheduler.running)
    for number in range(args.rounds):
        for depth in depths if number % 2 == 0 else reversed(depths):  # contexts grow, so the order turns around
            decoding.set_depth(depth)
            decoding.steps(SETTLE)
            before, graphs_before = decoding.tokens(), decoding.full_graphs
            times[depth].append(decoding.steps(args.steps))
            tokens[depth] += decoding.tokens() - before
            graphs[depth] += decoding.full_graphs - graphs_before
    for depth in depths:
        decoding.set_depth(depth)
        decoding.steps(SETTLE)
        steps = args.rounds * args.steps
        yield {"depth": depth, "ms": median(chain.from_iterable(times[depth])),
               "ms_of_rounds": list(map(median, times[depth])), "busy_ms": decoding.busy_ms(),
               "tokens_per_step": tokens[depth] / running / steps, "full_graphs": graphs[depth] / steps}  # fmt: skip


def prices(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times as long each depth takes as no drafts, in the same engine or in the same runner's."""
    plain = {(r["shape"], r["arm"][:2], r["arm"] if r["arm"] == "v2-drafts" else "", r["running"]): r
             for r in measured if r["depth"] == 0 and r["scheduling"] == "vllm"}  # fmt: skip
    found = []
    for row in measured:
        own = "v2-drafts" if row["arm"] == "v2-drafts" else ""
        base = plain.get((row["shape"], row["arm"][:2], own, row["running"]))
        if row["depth"] and base is not None:
            busy = row["busy_ms"] / base["busy_ms"] if row["busy_ms"] and base["busy_ms"] else None
            found.append({name: row[name] for name in ("shape", "arm", "running", "depth")}
                         | {"step": row["ms"] / base["ms"], "busy": busy})  # fmt: skip
    return found


def configuration(work: Path, name: str) -> Path:
    """Write the config.json of a shape, which is all that vLLM needs to draw its weights."""
    from benchmarks.harness.models import qwen3_config, text_sizes

    shape, folder = SHAPES[name], work / name
    config = qwen3_config(shape, text_sizes(None, shape))
    config.architectures = ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def run_arm(args: argparse.Namespace, shape: str, arm: str, left: float) -> list[dict[str, Any]]:
    """Return what a process of its own has measured before it failed or its time was over."""
    part = args.work / f"{shape}-{arm}.jsonl"
    part.unlink(missing_ok=True)
    seconds = min(left, args.arm_limit)
    command = [sys.executable, "-m", "benchmarks.bench_draft_rows", *sys.argv[1:], "--only", shape, arm, "--part",
               str(part), "--arm-limit", str(seconds)]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with devices_locked():
        if torch.cuda.is_available():
            wait_until_free(visible_devices()[:1])
        with (args.work / f"{shape}-{arm}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(seconds + 15)  # the process itself stops between batches
            except subprocess.TimeoutExpired:
                process.kill()
            finally:
                process.wait()
    lines = part.read_text().splitlines(keepends=True) if part.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def end_of(log: str) -> str:
    return "\n".join(f"    {line[:200]}" for line in log.splitlines()[-SHOWN_LINES:])


def main() -> int:
    began = time.monotonic()
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        with args.part.open("a") as file:
            for row in measure(args, args.work / args.only[0], began + args.arm_limit):
                print(json.dumps(row), file=file, flush=True)
        os._exit(0)  # vLLM's threads may outlive their engine
    exit_at_sigterm()
    device, versions = machine(revision(), PACKAGES)
    workload = {name: getattr(args, name) for name in WORKLOAD}
    measured: list[dict[str, Any]] = []
    complete = True
    for shape in args.shapes:
        configuration(args.work, shape)
        for arm in args.arms:
            left = args.limit - (time.monotonic() - began)
            if left <= 0:
                print(f"{shape} {arm}: not measured, --limit {args.limit:.0f} is over", flush=True)
                complete = False
                continue
            rows = run_arm(args, shape, arm, left)
            print(f"{shape} {arm}: {len(rows)} numbers after {time.monotonic() - began:.0f} s", flush=True)
            if not rows:
                print(end_of((args.work / f"{shape}-{arm}.log").read_text(errors="replace")), flush=True)
            complete &= len({row["running"] for row in rows}) == len(args.running)
            measured += rows
            report = {"device": device, "versions": versions, **workload, "prices": prices(measured),
                      "measured": measured}  # fmt: skip
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
