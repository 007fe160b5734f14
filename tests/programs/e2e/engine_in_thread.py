"""Generate with a server's engine, which runs in a thread, and print what it does with aborts, commands and faults."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from tests.programs.e2e.server_engine import make_request


async def observe(model: str) -> dict[str, Any]:
    import torch
    from swift.infer_engine import RequestConfig
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_megatron_grpo.generation.server.engine_process import Completer, ServedEngine
    from swift_megatron_grpo.generation.server.engine_thread import EngineFailed, EngineThread

    engine = ServedEngine(
        model, model_type="qwen3", template_type="qwen3", torch_dtype=torch.float32, use_async_engine=True,
        max_num_seqs=64, enforce_eager=True, max_model_len=128, logprobs_mode="processed_logprobs", seed=1,
        engine_kwargs={},
    )  # fmt: skip
    thread = engine.engine
    assert isinstance(thread, EngineThread)
    completer = Completer(engine)
    greedy = asdict(RequestConfig(max_tokens=24, temperature=0.9, top_k=1, return_details=True, logprobs=True))

    async def complete(question: str) -> list[Any]:
        completion = await completer.complete(make_request(question), dict(greedy))
        return [completion.completion_ids, completion.text, completion.finish_reason, completion.logprobs]

    async def stock(question: str) -> list[Any]:
        request = RolloutInferRequest(**make_request(question))
        choice = (await engine.infer_async(request, RequestConfig(**greedy))).choices[0]
        logprobs = [token["logprob"] for token in choice.logprobs["content"]]
        return [choice.token_ids, choice.message.content, choice.finish_reason, logprobs]

    pairs = [[await complete(question), await stock(question)] for question in ("hello", "what is two and two?")]
    together = await asyncio.gather(*(complete("hello") for _ in range(8)))
    without = await completer.complete(make_request("hello"), {**greedy, "logprobs": False})

    long = {**greedy, "max_tokens": 100}
    cancelled = [asyncio.create_task(completer.complete(make_request("x", i), long)) for i in range(64)]
    while not thread.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    await thread.reset_prefix_cache()  # runs after the aborts
    left = thread.output_processor.get_num_unfinished_requests()
    schedule = await thread._call(lambda llm: type(llm.engine_core.engine_core.scheduler.schedule).__name__)
    unknown = await _error_of(thread.collective_rpc("no_such_method"))
    after = await complete("hello")

    def fail() -> Any:
        raise RuntimeError("a kernel failed")

    waiting = asyncio.create_task(completer.complete(make_request("y"), long))
    while not thread.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)
    thread._commands.put((Future(), lambda llm: setattr(llm, "step", fail)))
    failures = [await _error_of(waiting), await _error_of(complete("hello"))]
    return {
        "pairs": pairs, "together": together, "without": without.logprobs, "left": left, "unknown": unknown,
        "schedule": schedule, "after": after, "failures": failures, "failed": EngineFailed.__name__,
        "errored": thread.errored,
    }  # fmt: skip


async def _error_of(work: Any) -> str:
    try:
        await work
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(model: str) -> None:
    print("RESULT " + json.dumps(asyncio.run(observe(model))))
