"""Completions from a vLLM engine in this process: ms-swift encodes prompts, and vLLM returns only what is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from swift.infer_engine import GRPOVllmEngine
from vllm import SamplingParams

from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.requests import infer_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm.sampling import sampling_params, to_completion
from swift_megatron_grpo.runtime.stopping.request import RunStopped, StopRequest
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout

# An engine on several ranks runs every step on all of them, so they have to leave it together. This costs one small
# reduction over gloo: 0.6 ms between two busy CPU ranks, so 0.04 ms per step.
_STEPS_BETWEEN_QUESTIONS = 16


class GiveUp:
    """Gives up a generation when the run stops, on all ranks of an engine after the same step of vLLM."""

    def __init__(self, stop: StopRequest, engine_ranks: dist.ProcessGroup | None) -> None:
        """`engine_ranks`: the ranks of the engine, over gloo; None for an engine on one rank."""
        self._stop, self._engine_ranks = stop, engine_ranks
        self._steps = 0

    def check(self) -> None:
        """Raise RunStopped if the run stops and its time for the current step is over."""
        self._steps += 1
        if self._is_over():
            raise self._stop.give_up("generation")

    def _is_over(self) -> bool:
        if self._engine_ranks is None:
            return self._stop.out_of_time()
        if self._steps % _STEPS_BETWEEN_QUESTIONS:
            return False
        over = torch.tensor([int(self._stop.out_of_time())])
        dist.all_reduce(over, op=dist.ReduceOp.MAX, group=self._engine_ranks)
        return bool(over.item())


def sample(
    engine: GRPOVllmEngine,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    weights_version: int,
    give_up: GiveUp,
) -> list[Rollout]:
    """Generate one completion for each request, in order."""
    encoded = _encode(engine, [request.prompt for request in requests])
    inputs = [encoded[request.prompt.prompt_id] for request in requests]
    params = (_params(engine, prompt, request, sampling) for prompt, request in zip(inputs, requests, strict=True))
    outputs = run_batch(engine, zip(inputs, params, strict=True), give_up)
    return [
        to_rollout(request, to_completion(engine, prompt, output), weights_version)
        for request, prompt, output in zip(requests, inputs, outputs, strict=True)
    ]


def _params(
    engine: GRPOVllmEngine, inputs: dict[str, Any], request: Request, sampling: SamplingConfig
) -> SamplingParams:
    try:
        return sampling_params(engine, inputs, request_config(sampling, request.seed))
    except ValueError as error:
        begin = str(request.prompt.row["messages"])[:200]
        raise ValueError(f"prompt {request.prompt.prompt_id}: {error}. It begins: {begin}") from error


def run_batch(
    engine: GRPOVllmEngine, requests: Iterable[tuple[dict[str, Any], SamplingParams]], give_up: GiveUp
) -> list[Any]:
    """Run encoded prompts as one batch. Return vLLM's outputs in order, or raise RunStopped if the run stops."""
    adapter = engine._get_grpo_lora_request()
    ids = []
    for number, (inputs, params) in enumerate(requests):
        ids.append(str(number))
        engine._add_request(inputs, params, ids[-1], adapter_request=adapter)
    finished: dict[str, Any] = {}
    while engine.engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.engine.step())
        try:
            give_up.check()
        except RunStopped:
            engine.engine.abort_request([request_id for request_id in ids if request_id not in finished])
            raise
    return [finished[request_id] for request_id in ids]


def _encode(engine: GRPOVllmEngine, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """Encode each prompt once, however many completions it gets."""
    distinct = {prompt.prompt_id: prompt for prompt in prompts}
    engine.template.set_mode("vllm")
    inputs, _ = engine._batch_encode([infer_request(prompt) for prompt in distinct.values()], strict=True)
    return dict(zip(distinct, inputs, strict=True))
