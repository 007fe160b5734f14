"""Send the same requests to a vLLM engine by this package and by ms-swift's `infer`, and print both results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from swift.infer_engine import GRPOVllmEngine

from swift_megatron_grpo.generation.interface import Request, requests_for
from swift_megatron_grpo.generation.local.engine import GiveUp, sample
from swift_megatron_grpo.generation.requests import infer_request, request_config
from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout
from tests.forking.client import free_port

GENERATIONS, TOKENS = 3, 24


def main(model: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    engine = GRPOVllmEngine(
        model, model_type="qwen3", template_type="qwen3", torch_dtype=torch.float32, use_async_engine=False,
        max_num_seqs=4, enforce_eager=True, max_model_len=128, distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs", engine_kwargs={}, seed=1,
    )  # fmt: skip
    questions = ("hello", "what is two and two?", "a" * 70)  # the last one leaves less room than TOKENS
    rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    requests = requests_for([Prompt(str(i), row) for i, row in enumerate(rows)], GENERATIONS, seed=None, version=3)
    give_up = GiveUp(StopRequest(Coordinator(timedelta(seconds=60)), grace=120), engine_ranks=None)
    stops = ((), (_some_word(engine, requests[-1], give_up),))
    # top_k 1 makes sampling deterministic
    configs = [SamplingConfig(0.9, 1.0, 1, 1.0, TOKENS, stop) for stop in stops]
    unaided = [_listed(sample(engine, requests, greedy, 3, give_up)) for greedy in configs]
    assert speed_up_decoding(engine.engine)
    together = _tokens_together(engine.engine.output_processor)
    results = []
    for stop, greedy, before in zip(stops, configs, unaided, strict=True):
        ours = sample(engine, requests, greedy, 3, give_up)
        stock = engine.infer(
            [infer_request(request.prompt) for request in requests], request_config(greedy), use_tqdm=False
        )
        results.append({
            "stop": stop,
            "unaided": before,
            "ours": _listed(ours),
            "stock": [_values(output.response) for output in stock],
            "versions": [r.weights_version for r in ours],
            "together": max(together),
        })  # fmt: skip
    seeded = [replace(request, seed=7 + request.index) for request in requests]
    sampled = SamplingConfig(0.9, 1.0, -1, 1.0, TOKENS, ())
    results[0]["seeded"] = [
        _tokens(sample(engine, seeded, sampled, 3, give_up)),  # those of a prompt together
        _tokens(sample(engine, [request], sampled, 3, give_up)[0] for request in seeded),
    ]
    results[0]["greedy"] = _tokens(sample(engine, requests, replace(sampled, temperature=0.0), 3, give_up))
    print("RESULT " + json.dumps(results))


def _tokens_together(processor: Any) -> list[int]:
    """Return a list that grows by the number of tokens that reach vLLM's output processor together."""
    process, together = processor.process_outputs, list[int]()

    def recorded(outputs: Any, *arguments: Any, **options: Any) -> Any:
        together.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, *arguments, **options)

    processor.process_outputs = recorded
    return together


def _tokens(rollouts: Iterable[Rollout]) -> list[list[int]]:
    return [rollout.completion_ids for rollout in rollouts]


def _listed(rollouts: Sequence[Rollout]) -> list[list[object]]:
    return [[r.prompt_ids, r.completion_ids, r.text, r.finish_reason, r.logprobs] for r in rollouts]


def _some_word(engine: GRPOVllmEngine, request: Request, give_up: GiveUp) -> str:
    """Return three characters that the model will generate. A token is one character, so they are several tokens."""
    rollout = sample(engine, [request], SamplingConfig(0.9, 1.0, 1, 1.0, TOKENS, ()), 0, give_up)[0]
    word: str = engine.tokenizer.decode(rollout.completion_ids[2:5])
    assert word.isascii() and len(word) == 3
    return word


def _values(response: object) -> list[object]:
    choice = response.choices[0]  # type: ignore[attr-defined]
    logprobs = [token["logprob"] for token in choice.logprobs["content"]]
    prompt_ids = response.prompt_token_ids  # type: ignore[attr-defined]
    return [prompt_ids, choice.token_ids, choice.message.content, choice.finish_reason, logprobs]
