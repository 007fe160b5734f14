"""Generate with and without drafts in one vLLM engine with a small cache, and print both; for test_speculation.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from swift_megatron_grpo.generation.vllm import position_noise, verification
from swift_megatron_grpo.generation.vllm.drafts import GroupDrafts, History, engine_settings

DEPTH = 4
# Settings of requests that run at the same time. Without a temperature vLLM samples at 1.
CASES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 1.0}],
    "low temperature": [{"temperature": 0.04}],
    "top_k and top_p": [{"temperature": 0.3, "top_k": 8, "top_p": 0.9}],
    "repetition penalty": [{"temperature": 0.05, "repetition_penalty": 1.2}],
    "stop tokens": [{"temperature": 0.05, "stop_token_ids": list(range(0, 260, 9))}],
    "greedy": [{"temperature": 0.0}],
    "end of the context": [{"temperature": 0.04, "max_tokens": 10**4}],
    "released model": [
        {"temperature": 0.7, "stop_token_ids": [2]},
        {"temperature": 1.0, "top_p": 0.95, "stop_token_ids": [2]},
        {"temperature": 0.3, "top_k": 40, "stop_token_ids": [2, 30]},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 0.0},
    ],
    "all at once": [
        {"temperature": 0.04, "max_tokens": 37},
        {"temperature": 0.0},
        {"temperature": 0.2, "top_k": 3},
        {"temperature": 0.1, "top_p": 0.5, "stop_token_ids": list(range(0, 260, 7))},
        {"temperature": 0.04, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "max_tokens": 5},
    ],
}


def main(
    model: str, questions: Sequence[str], of_each: int, tokens: int, blocks: int, cases: Sequence[str], rollouts: str
) -> None:
    """Compare all `cases`, and three `rollouts` of one of them: before and after an update of the weights."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from transformers import AutoTokenizer
    from vllm import LLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)
        for text in questions
    ]
    position_noise.sample_by_position()
    llm = LLM(model, dtype="float32", max_num_seqs=24, max_num_batched_tokens=128, max_model_len=blocks * 16, seed=1,
              enforce_eager=True, enable_prefix_caching=True, logprobs_mode="processed_logprobs", block_size=32,
              num_gpu_blocks_override=blocks, **engine_settings(DEPTH))  # fmt: skip
    engine = Engine(llm.llm_engine, [prompt["input_ids"] for prompt in prompts], of_each, tokens)
    report = {case: engine.compare(CASES[case], long=case == "end of the context") for case in cases}
    report["first rollout"] = engine.compare(CASES[rollouts])
    report["second rollout"] = engine.compare(CASES[rollouts], engine.history, seed=10**6)
    engine.change_weights()
    report["after an update"] = engine.compare(CASES[rollouts], engine.history, seed=10**7)
    if cases:
        position_noise.accepted = always_accepted
        report["planted"] = engine.compare(CASES[rollouts])
    print("RESULT " + json.dumps(report))


class Engine:
    def __init__(self, engine: Any, prompts: list[list[int]], of_each: int, tokens: int) -> None:
        self._engine, self._prompts, self._of_each, self._tokens = engine, prompts, of_each, tokens
        core = engine.engine_core.engine_core
        self._scheduler, self._runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        self._drafts: GroupDrafts = self._runner.drafter
        self._drafts.follow(self._runner)
        self._names = iter(range(10**9))
        self._preempted = 0
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preempted += 1
            return preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    def compare(
        self, settings: list[dict[str, Any]], history: History | None = None, long: bool = False, seed: int = 0
    ) -> Any:
        """Generate without drafts, and with drafts also from a history."""
        prompts = self._prompts
        if long:  # they leave room for so many tokens
            room = self._runner.max_model_len - self._tokens
            prompts = [(prompt * (1 + room // len(prompt)))[: room - place] for place, prompt in enumerate(prompts)]
        self.history = History() if history is None else history
        return [self._run(prompts, settings, seed, depth) for depth in (0, DEPTH)]

    def _run(self, prompts: list[list[int]], settings: list[dict[str, Any]], seed: int, depth: int) -> Any:
        """Return tokens and log-probs of all requests, the engine's steps, and what drafts have done."""
        from vllm import SamplingParams

        self._drafts._most, self._preempted = depth, 0
        self._drafts._history = self.history if depth else History()
        requests = [(prompt, settings[i % len(settings)]) for prompt in prompts for i in range(self._of_each)]
        names = []
        for place, (prompt, values) in enumerate(requests):
            names.append(str(next(self._names)))
            values = {"max_tokens": self._tokens, "detokenize": False, "logprobs": 0, **values}
            params = SamplingParams(seed=seed + place, **values)
            self._engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        done: dict[str, Any] = {}
        steps = 0
        while self._engine.has_unfinished_requests():
            steps += 1
            for output in self._engine.step():
                if output.finished:
                    [found] = output.outputs
                    pairs = zip(found.logprobs, found.token_ids, strict=True)
                    done[output.request_id] = list(found.token_ids), [at[token].logprob for at, token in pairs]
        results = [done[name] for name in names]
        self._drafts.end_generation(sum(len(tokens) for tokens, _ in results))
        self._drafts.remember((prompt, tokens) for (prompt, _), (tokens, _) in zip(requests, results, strict=True))
        counts = self._drafts.take_counts()
        return {"results": results, "steps": steps, "preempted": self._preempted, "verified": counts.drafted,
                "accepted": counts.accepted}  # fmt: skip

    def change_weights(self) -> None:
        """Add noise to every matrix, so that what was remembered came from another policy."""
        generator = torch.Generator().manual_seed(0)
        for weight in self._runner.model.parameters():
            if weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.data += 0.1 * weight.float().std() * noise
        assert self._engine.reset_prefix_cache()


def always_accepted(*args: Any) -> torch.Tensor:
    """Accept every draft, as a wrong rule would."""
    tokens = verification.accepted(*args)
    drafts, counts = args[1].to(torch.int32), args[2]
    begin = 0
    for row, count in enumerate(counts):
        tokens[row, :count] = drafts[begin : begin + count]
        if count:
            tokens[row, count] = args[5][row, 0]
        begin += count
    return tokens
