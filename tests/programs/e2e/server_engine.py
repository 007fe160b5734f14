"""Send the same requests to a server's engine by server/engine_process.py and by ms-swift's `infer_async`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

Complete = Callable[[dict[str, Any], dict[str, Any]], Awaitable[list[Any]]]
TOKENS, MANY = 24, 128


def make_request(question: str, number: int = 0) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "uuid": f"{question[:5]} {number}"}


async def compare(model: str) -> dict[str, Any]:
    import torch
    from swift.infer_engine import GRPOVllmEngine, RequestConfig
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_megatron_grpo.generation.server.engine_process import WORKER_EXTENSION, Completer

    engine = GRPOVllmEngine(
        model, model_type="qwen3", template_type="qwen3", torch_dtype=torch.float32, use_async_engine=True,
        max_num_seqs=64, enforce_eager=True, max_model_len=128, logprobs_mode="processed_logprobs", seed=1,
        engine_kwargs={"worker_extension_cls": WORKER_EXTENSION},
    )  # fmt: skip
    completer = Completer(engine)

    async def ours(request: dict[str, Any], sampling: dict[str, Any]) -> list[Any]:
        completion = await completer.complete(request, sampling)
        return [completion.prompt_ids, completion.completion_ids, completion.text, completion.finish_reason,
                completion.logprobs]  # fmt: skip

    async def stock(request: dict[str, Any], sampling: dict[str, Any]) -> list[Any]:
        response = await engine.infer_async(RolloutInferRequest(**request), RequestConfig(**sampling))
        choice = response.choices[0]
        logprobs = [token["logprob"] for token in choice.logprobs["content"]]
        return [response.prompt_token_ids, choice.token_ids, choice.message.content, choice.finish_reason, logprobs]

    def sampling(seed: int | None = None, stop: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        details = {"return_details": True, "logprobs": True, **more}
        return asdict(RequestConfig(max_tokens=TOKENS, seed=seed, stop=list(stop), **details))

    questions = ["hello", "what is two and two?", "a" * 70]  # the last one leaves less room than TOKENS
    greedy, seeded = sampling(temperature=0.9, top_k=1), sampling(7, temperature=0.9, top_p=0.9)
    completion_ids = (await ours(make_request(questions[0]), greedy))[1]
    word = engine.tokenizer.decode(completion_ids[2:5])  # a token is one character, so these are three tokens
    likeliest = sampling(7, temperature=0.9, min_p=0.999999)  # as good as greedy
    cases = [greedy, seeded, sampling(temperature=0.9, top_k=1, stop=[word]), likeliest]
    pairs = [
        [await complete(make_request(question), case) for complete in (ours, stock)]
        for case in cases
        for question in questions
    ]

    # a prompt with many requests in flight is encoded once, and its encoding is not kept afterwards
    encode, encoded = engine.template.encode, list[Any]()
    engine.template.encode = lambda *args: (encoded.append(args), encode(*args))[1]
    many = [sampling(seed, temperature=0.9) for seed in range(8)]
    together = await asyncio.gather(*(ours(make_request(questions[0], i), config) for i, config in enumerate(many)))
    engine.template.encode = encode
    kept = len(completer._encodings)

    # cancelled requests are aborted in the engine
    long = sampling(temperature=0.9) | {"max_tokens": 100}
    cancelled = [asyncio.create_task(ours(make_request("x", i), long)) for i in range(64)]
    while not engine.engine.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    left = engine.engine.output_processor.get_num_unfinished_requests()

    async def cost(complete: Complete) -> float:
        """Return this process's CPU milliseconds per request. The model runs in another process, the same for both."""
        began = time.process_time()
        requests = (make_request(questions[i // 8 % 2] + str(i // 8), i) for i in range(MANY))
        await asyncio.gather(*(complete(request, sampling(i, temperature=0.9)) for i, request in enumerate(requests)))
        return 1000 * (time.process_time() - began) / MANY

    costs = [[await cost(complete) for complete in (stock, ours)] for _ in range(2)]
    engine.engine.shutdown()
    return {
        "pairs": pairs, "word": word, "together": together, "encoded": len(encoded), "kept": kept, "left": left,
        "costs": costs,
    }  # fmt: skip


def main(model: str) -> None:
    print("RESULT " + json.dumps(asyncio.run(compare(model))))
