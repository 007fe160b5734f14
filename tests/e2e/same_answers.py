"""A real vLLM engine asked twice, by this package and by ms-swift's own `infer`; prints what both said.

python same_answers.py MODEL
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1"}

from swift_megatron_grpo.plugin.activation import hook_platform

hook_platform()

import mcore_bridge  # noqa: E402, F401  # has the platform put in place
import torch  # noqa: E402
from swift.infer_engine import GRPOVllmEngine  # noqa: E402

from swift_megatron_grpo.config import SamplingConfig  # noqa: E402
from swift_megatron_grpo.generation.interface import Request, requests_for  # noqa: E402
from swift_megatron_grpo.generation.local.sampling import sample  # noqa: E402
from swift_megatron_grpo.generation.requests import infer_request, request_config  # noqa: E402
from swift_megatron_grpo.types import Prompt  # noqa: E402

GENERATIONS, TOKENS = 3, 24


def main(model: str) -> None:
    engine = GRPOVllmEngine(
        model, model_type="qwen3", template_type="qwen3", torch_dtype=torch.float32, use_async_engine=False,
        max_num_seqs=4, enforce_eager=True, max_model_len=128, distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs", engine_kwargs={}, seed=1,
    )  # fmt: skip
    questions = ("hello", "what is two and two?", "a" * 70)  # the last one leaves less room than asked for
    rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    requests = requests_for([Prompt(str(i), row) for i, row in enumerate(rows)], GENERATIONS, seed=None, version=3)
    told = []
    for stop in ((), (_some_word(engine, requests[-1]),)):
        greedy = SamplingConfig(0.9, 1.0, 1, 1.0, TOKENS, stop)  # top_k 1: nothing is left to chance
        mine = sample(engine, requests, greedy, weights_version=3)
        theirs = engine.infer(
            [infer_request(request.prompt) for request in requests], request_config(greedy), use_tqdm=False
        )
        told.append({
            "stop": stop,
            "mine": [[r.prompt_ids, r.completion_ids, r.text, r.finish_reason, r.logprobs] for r in mine],
            "theirs": [_values(answer.response) for answer in theirs],
            "versions": [r.weights_version for r in mine],
        })  # fmt: skip
    print(json.dumps(told))


def _some_word(engine: GRPOVllmEngine, request: Request) -> str:
    """Three characters that the model will say. A token is a character here, so they have none of their own."""
    answer = sample(engine, [request], SamplingConfig(0.9, 1.0, 1, 1.0, TOKENS, ()), 0)[0]
    said: str = engine.tokenizer.decode(answer.completion_ids[2:5])
    assert said.isascii() and len(said) == 3
    return said


def _values(response: object) -> list[object]:
    choice = response.choices[0]  # type: ignore[attr-defined]
    logprobs = [token["logprob"] for token in choice.logprobs["content"]]
    prompt_ids = response.prompt_token_ids  # type: ignore[attr-defined]
    return [prompt_ids, choice.token_ids, choice.message.content, choice.finish_reason, logprobs]


if __name__ == "__main__":
    main(sys.argv[1])
