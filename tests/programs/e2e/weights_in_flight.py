"""Swap the weights of a server's engine while it generates, and compare every span with plain transformers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tests.programs.e2e.server_engine import make_request

# What a version multiplies by its factor. Both implementations have these names.
SCALED = (
    "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.self_attn.o_proj.weight", "model.norm.weight",
)  # fmt: skip
FACTORS = {1: 1.0, 2: 1.5, 3: 0.5, 4: 1.25, 5: 0.8}  # of a version, relative to the one before
TOKENS, AT_ONCE = 60, 4


def scale(model: Any, version: int) -> None:
    parameters = dict(model.named_parameters())
    for name in SCALED:
        parameters[name].data.mul_(FACTORS[version])


async def observe(path: str, drafts: int, temperature: float) -> dict[str, Any]:
    """`drafts`: that a step verifies of a request. With drafts, requests have their number as seed."""
    import torch
    from swift.infer_engine import RequestConfig

    from swift_megatron_grpo.generation.server.engine_process import EngineCommands, ServedEngine
    from swift_megatron_grpo.generation.vllm.second_runner import draft_settings

    class Endless(ServedEngine):
        """No token ends a completion, so all are as long as the test needs."""

        def _add_request(self, inputs: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            params.ignore_eos, params.stop, params.stop_token_ids = True, [], []
            return super()._add_request(inputs, params, *args, **kwargs)

    engine = Endless(
        path, model_type="qwen3", template_type="qwen3", torch_dtype=torch.float32, use_async_engine=True,
        max_num_seqs=AT_ONCE, enforce_eager=True, max_model_len=256, logprobs_mode="processed_logprobs", seed=1,
        engine_kwargs={"block_size": 32, "max_num_batched_tokens": 64, **draft_settings(drafts, AT_ONCE, False)},
    )  # fmt: skip
    thread = engine.engine
    if drafts:
        await thread.collective_rpc("grpo_draft")
    commands = EngineCommands(engine, None, 1)
    thread.version = commands._version = 1
    sampling = asdict(RequestConfig(max_tokens=TOKENS, temperature=temperature, return_details=True, logprobs=True))

    def start(number: int, repeats: int = 3, **more: Any) -> asyncio.Task[dict[str, Any]]:
        # of one prompt, whose blocks are shared
        request = make_request("what is two and two? " * repeats, number)
        seeded = {"seed": number} if drafts else {}
        return asyncio.create_task(commands.generate(request, {**sampling, **seeded, **more}))

    async def of_requests(value: Callable[[Any], int]) -> int:
        """Return the sum of a value over the requests in progress."""
        return int(await thread._call(lambda llm: sum(map(value, scheduler_of(llm).requests.values()))))

    async def tokens() -> int:
        return await of_requests(lambda request: request.num_output_tokens)

    async def generated(number: int) -> None:
        end = await tokens() + number
        while await tokens() < end:
            await asyncio.sleep(0)

    async def swap(version: int) -> None:
        await thread.update_in_flight(version, lambda llm: llm.apply_model(lambda model: scale(model, version)))

    running = [start(number) for number in range(AT_ONCE + 2)]  # two of them wait for the first to end
    for version in (2, 3):
        await generated(AT_ONCE * 7 + version)
        await swap(version)
    running += [start(number) for number in range(6, 9)]
    await asyncio.wait(running[:AT_ONCE])
    await generated(AT_ONCE * 3)
    await swap(4)
    completions = await asyncio.gather(*running)

    long = start(9, repeats=8)  # its prompt takes several steps
    while not await of_requests(lambda request: request.num_computed_tokens):
        await asyncio.sleep(0)
    assert not await tokens()
    await swap(5)
    completions.append(await long)

    cancelled = [start(number, max_tokens=180) for number in range(2)]
    await generated(4)
    failed = await _error_of(commands.receive(6, lora=False, collect_checksums=False, in_flight=True))
    outcomes = await asyncio.gather(*cancelled, return_exceptions=True)
    left = await tokens()
    refused = await _error_of(start(10))
    commands._is_mixed = False  # as newer weights leave it
    return {
        "completions": completions, "after": await start(10), "refused": refused,
        "differences": [difference(path, one, temperature, n if drafts else None) for n, one in enumerate(completions)],
        "planted": [difference(path, each, temperature) for each in planted(completions)],
        "drafts": (await thread.collective_rpc("grpo_take_draft_counts"))[0] if drafts else None,
        "failed": failed, "cancelled": [type(outcome).__name__ for outcome in outcomes], "left": left,
        "schedule": await thread._call(lambda llm: type(scheduler_of(llm).schedule).__name__),
    }  # fmt: skip


def planted(completions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return completions with a token, or all of a span, under the name of the wrong weights."""
    [(version, tokens), (newer, others), *rest] = next(each["spans"] for each in completions if each["spans"])
    one = next(each for each in completions if each["spans"])
    wrong = [[[version, tokens + 1], [newer, others - 1], *rest], [[version, tokens - 1], [newer, others + 1], *rest],
             [[newer, tokens + others], *rest]]  # fmt: skip
    return [one | {"spans": spans} for spans in wrong]


def scheduler_of(llm: Any) -> Any:
    return llm.engine_core.engine_core.scheduler


def difference(path: str, message: dict[str, Any], temperature: float, seed: int | None = None) -> float:
    """Return the largest difference between an engine's log-probs and those of transformers.

    The weights change where the spans do, and the keys and values of earlier tokens stay. It is infinite if any token
    is not what the noise of `seed` samples at its position.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from swift_megatron_grpo.generation.protocol.messages import Completion
    from swift_megatron_grpo.generation.vllm.position_noise import noisy_argmax

    completion = Completion.from_json(message)
    spans = completion.spans or [(completion.weights_version, len(completion.completion_ids))]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    version, cache, expected = 1, None, list[float]()
    fed: Sequence[int] = completion.prompt_ids
    remaining = list(completion.completion_ids)
    with torch.no_grad():
        for target, count in spans:
            while version < target:
                version += 1
                scale(model, version)
            for _ in range(count):
                output = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                fed = [remaining.pop(0)]
                logits = output.logits[0, -1:] / temperature
                if seed is not None:
                    place = np.array([len(completion.prompt_ids) + len(expected)])
                    if noisy_argmax(logits, np.array([seed]), place).item() != fed[0]:
                        return math.inf
                expected.append(float(logits[0].log_softmax(-1)[fed[0]]))
    assert completion.logprobs is not None
    return max(abs(ours - theirs) for ours, theirs in zip(completion.logprobs, expected, strict=True))


async def _error_of(work: Any) -> str:
    try:
        await work
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(path: str, drafts: int = 0, temperature: float = 1.0) -> None:
    print("RESULT " + json.dumps(asyncio.run(observe(path, drafts, temperature))))
