"""Sample seeded requests in a vLLM engine whose batches differ, and print their tokens; for test_position_noise.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swift_megatron_grpo.generation.vllm.position_noise import sample_by_position

TOKENS, CUT = 24, 9
LAW_DRAWS = 3000
LAW_PROMPT = [5, 9, 5, 17, 30]
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.7, "top_k": 12},
    "top_p": {"temperature": 1.2, "top_p": 0.3},
    "min_p": {"temperature": 0.5, "min_p": 0.2, "repetition_penalty": 1.8},
}


def main(model: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    sample_by_position()
    llm = LLM(model, dtype="float32", max_num_seqs=64, max_num_batched_tokens=64, max_model_len=128, seed=1,
              enforce_eager=True, enable_prefix_caching=False, logprobs_mode="processed_logprobs")  # fmt: skip
    engine = llm.llm_engine
    numbers = iter(range(10**9))

    def run(requests: Iterable[tuple[list[int], dict[str, Any]]], disturb: Callable[[int], None] | None = None) -> Any:
        """Return tokens and log-probs of requests that are in the engine at the same time."""
        names = []
        for prompt, settings in requests:
            names.append(str(next(numbers)))
            values = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 0, **settings}
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, SamplingParams(**values))
        done: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            if disturb is not None:
                disturb(steps)
            steps += 1
            for output in engine.step():
                if output.finished:
                    [found] = output.outputs
                    pairs = zip(found.logprobs, found.token_ids, strict=True)
                    done[output.request_id] = list(found.token_ids), [at[token].logprob for at, token in pairs]
        return [done[name] for name in names]

    def preempt(step: int) -> None:
        if step in (6, 15):
            assert engine.engine_core.engine_core.reset_prefix_cache(reset_running_requests=True)

    # The last prompts are longer than a step has tokens, so that they are decoded in parts, beside running requests.
    prompts = [[2 + i % 40, *range(3, 3 + 4 * i)] for i in range(1, 9)] + [[40, *range(2, 42), *range(2, 42)]] * 2
    seeded = [(prompt, {"temperature": 1.0, "seed": 2**40 + i}) for i, prompt in enumerate(prompts)]
    noise = [([7, 8, i], {"temperature": 1.0}) for i in range(6)]
    greedy = [([9, 8, i], {"temperature": 0.0}) for i in range(3)]
    together = run(seeded)
    report = {
        "together": together,
        "alone": [run([request])[0] for request in seeded],
        "reversed": run(seeded[::-1])[::-1],
        "beside others": run([*noise, *seeded, *greedy])[len(noise) : len(noise) + len(seeded)],
        "preempted": run(seeded, preempt),
        "same seeds": run([(LAW_PROMPT, {"temperature": 1.0, "seed": 3})] * 2),
        "unseeded": run([(LAW_PROMPT, {"temperature": 1.0})] * 2 + seeded[:1])[:2],
        "greedy": [run([*greedy, *others])[: len(greedy)] for others in ([], seeded)],
        "continued": [
            tokens[:CUT] + run([([*prompt, *tokens[:CUT]], {**settings, "max_tokens": TOKENS - CUT})])[0][0]
            for (prompt, settings), (tokens, _) in zip(seeded[:4], together, strict=False)
        ],
        "law": {
            name: [tokens[0] for tokens, _ in run((LAW_PROMPT, {**settings, "max_tokens": 1, "seed": seed})
                                                  for seed in range(LAW_DRAWS))]
            for name, settings in SETTINGS.items()
        },
        "logits": logits_of(model),
    }  # fmt: skip
    print("RESULT " + json.dumps(report))


def logits_of(model: str) -> list[float]:
    """Return what transformers computes for the token after LAW_PROMPT."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits: list[float] = reference(torch.tensor([LAW_PROMPT])).logits[0, -1].tolist()
    return logits
