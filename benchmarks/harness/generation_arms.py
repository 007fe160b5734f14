"""The two processes that bench_server.py compares: vLLM in this process, and vLLM behind the rollout server.

    python -m benchmarks.harness.generation_arms in_process MODEL SETTINGS    generates for each line of standard input
    python -m benchmarks.harness.generation_arms server FLAGS                 `swift rollout` with its checkpoint

Both end a completion at its longest length, as random weights would not, and both run the code of a training run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

PROFILED_TOKENS = 64
WEIGHTS_VERSION = 0  # of the checkpoint, which the server has without a transfer


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Describe what both arms generate, and with which engine."""

    prompts: int
    group_size: int
    prompt_characters: int
    tokens: int  # of every completion
    max_model_len: int
    max_num_seqs: int
    memory_share: float  # of the GPU, for each of the two engines
    dtype: str
    eager: bool
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # of vLLM
    drafts: int = 0  # the most of a request in a step


def prompts_of(job: GenerationJob, number: int) -> list[Any]:
    """Return the prompts of one round; no two rounds share one, so that no round finds cached prefixes."""
    from benchmarks.harness.workload import FILLER
    from swift_megatron_grpo.types import Prompt

    def content(place: int) -> str:
        return f"{number} {place} ".ljust(job.prompt_characters, FILLER)

    return [
        Prompt(f"{number}-{place}", {"messages": [{"role": "user", "content": content(place)}]})
        for place in range(job.prompts)
    ]


def sampling_of(job: GenerationJob) -> Any:
    from swift_megatron_grpo.settings.config import SamplingConfig

    return SamplingConfig(1.0, 1.0, -1, 1.0, job.tokens, ())


def end_at_longest_length() -> None:
    """Make vLLM ignore the token that ends a completion, in this process."""
    from swift.infer_engine import GRPOVllmEngine

    prepare = GRPOVllmEngine._prepare_generation_config

    def without_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = prepare(self, *args, **kwargs)
        params.ignore_eos = True
        return params

    GRPOVllmEngine._prepare_generation_config = without_end
    GRPOVllmEngine._add_stop_words = lambda *_, **__: None


def serve_in_process(model: str, job: GenerationJob) -> None:
    """Build a trainer's engine. For each number on standard input generate a round, and print its time."""
    engine = colocated_engine(model, job)
    sampling = sampling_of(job)
    print("READY", flush=True)
    from swift_megatron_grpo.generation.interface import requests_for

    for line in sys.stdin:
        if line == "profile\n":
            print("PROFILE " + json.dumps(profiled(engine, job)), flush=True)
            continue
        requests = requests_for(prompts_of(job, int(line)), job.group_size, seed=None, version=WEIGHTS_VERSION)
        began, cpu = time.perf_counter(), time.process_time()
        finished = engine.generate(requests, job.group_size, sampling).next(WEIGHTS_VERSION).finished
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        tokens = sum(len(rollout.completion_ids) for rollout in finished.values())
        print("ROUND " + json.dumps({"seconds": seconds, "tokens": tokens, "cpu_seconds": cpu}), flush=True)
    engine.shutdown()
    os._exit(0)


def profiled(engine: Any, job: GenerationJob) -> dict[str, Any]:
    """Generate two short rounds under profilers: of the GPU's kernels, and of the host's functions."""
    from benchmarks.harness.busy_time import functions_of, kernels_of
    from swift_megatron_grpo.generation.interface import requests_for

    short = replace(job, tokens=min(job.tokens, PROFILED_TOKENS))

    def generate(number: int) -> None:
        requests = requests_for(prompts_of(short, number), short.group_size, seed=None, version=WEIGHTS_VERSION)
        engine.generate(requests, short.group_size, sampling_of(short)).next(WEIGHTS_VERSION)

    return {**kernels_of(partial(generate, -1), short.tokens), "host": functions_of(partial(generate, -2))}


def colocated_engine(model: str, job: GenerationJob) -> Any:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.version.cuda else "gloo")
    end_at_longest_length()
    from datetime import timedelta

    from swift.model import get_processor
    from swift.template import get_template

    from swift_megatron_grpo.generation.local.engine import LocalVllm
    from swift_megatron_grpo.runtime.parallel import Coordinator
    from swift_megatron_grpo.runtime.stopping.request import StopRequest
    from swift_megatron_grpo.settings.config import VllmConfig

    config = VllmConfig(
        model_dir=model, model_type="qwen3", torch_dtype=getattr(torch, job.dtype), seed=1, vllm_mode="colocate",
        vllm_gpu_memory_utilization=job.memory_share, vllm_max_model_len=job.max_model_len,
        vllm_max_num_seqs=job.max_num_seqs, vllm_enforce_eager=job.eager,
        vllm_engine_kwargs=job.engine_kwargs, drafts=job.drafts,
    )  # fmt: skip
    template = get_template(get_processor(model, model_type="qwen3"), template_type="qwen3")
    return LocalVllm(config, template, StopRequest(Coordinator(timedelta(seconds=60)), grace=120.0))


def serve_behind_server(flags: list[str]) -> None:
    """Run `swift rollout`, which accepts requests for the checkpoint's weights: one GPU cannot send them to itself."""
    from swift_megatron_grpo.generation.server import deploy, engine_process, routes

    class CheckpointRoutes(routes.RolloutRoutes):
        def _require_weights(self, run: Any, version: int, or_newer: bool = False) -> None:
            assert version == WEIGHTS_VERSION

        async def _complete(self, run: Any, body: Any) -> dict[str, Any]:
            return {**await super()._complete(run, body), "weights_version": WEIGHTS_VERSION}

    vars(deploy)["run_engine_process"] = _run_engine_process
    assert engine_process.run_engine_process is not _run_engine_process
    vars(deploy)["RolloutRoutes"] = CheckpointRoutes
    deploy.GRPORolloutDeploy(flags).main()


def _run_engine_process(*arguments: Any) -> None:
    from swift_megatron_grpo.generation.server.engine_process import run_engine_process

    end_at_longest_length()
    run_engine_process(*arguments)


def main() -> None:
    import torch

    arm, *arguments = sys.argv[1:]
    if arm == "in_process":
        serve_in_process(arguments[0], GenerationJob(**json.loads(arguments[1])))
        return
    if torch.accelerator.current_accelerator(check_available=True) is None:
        from swift_megatron_grpo.platforms.cpu import prepare_server_environment

        prepare_server_environment()
    from swift_megatron_grpo.generation.server.signals import end_at_signals

    with end_at_signals():
        serve_behind_server(arguments)


if __name__ == "__main__":
    main()
