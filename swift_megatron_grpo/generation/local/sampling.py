"""Completions from a vLLM engine in this process: ms-swift encodes the prompts, vLLM is asked for what is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.infer_engine import GRPOVllmEngine

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.requests import infer_request, request_config
from swift_megatron_grpo.types import Prompt, Rollout
from swift_megatron_grpo.vllm_shared.sampling import sampled_logprobs, sampling_params


def sample(
    engine: GRPOVllmEngine, requests: Sequence[Request], sampling: SamplingConfig, weights_version: int
) -> list[Rollout]:
    """One completion for each request, in order."""
    encoded = _encode(engine, [request.prompt for request in requests])
    adapter = engine._get_grpo_lora_request()
    for number, request in enumerate(requests):
        inputs = encoded[request.prompt.prompt_id]
        params = sampling_params(engine, inputs, request_config(sampling, request.seed))
        engine._add_request(inputs, params, str(number), adapter_request=adapter)
    finished: dict[str, Any] = {}
    while engine.engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.engine.step())
    rollouts = []
    for number, request in enumerate(requests):
        output = finished[str(number)]
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)
        rollouts.append(
            Rollout(
                prompt=request.prompt,
                prompt_ids=list(output.prompt_token_ids),
                completion_ids=token_ids,
                logprobs=sampled_logprobs(answer),
                text=engine.template.decode_generate_ids(
                    token_ids, template_inputs=encoded[request.prompt.prompt_id]["template_inputs"]
                ),
                finish_reason=answer.finish_reason,
                weights_version=weights_version,
            )
        )
    return rollouts


def _encode(engine: GRPOVllmEngine, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """Each prompt once, however many completions it gets."""
    distinct = {prompt.prompt_id: prompt for prompt in prompts}
    engine.template.set_mode("vllm")
    inputs, _ = engine._batch_encode([infer_request(prompt) for prompt in distinct.values()], strict=True)
    return dict(zip(distinct, inputs, strict=True))
