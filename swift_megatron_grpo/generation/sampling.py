"""Completions from a vLLM engine in this process: ms-swift encodes the prompts, vLLM is asked for what is read.

ms-swift's `infer` makes vLLM turn every token into text as it comes and report every request at every step, and then
turns each token into text once more beside its log-prob. On an H200 that was a quarter of the time of generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.infer_engine import GRPOVllmEngine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.engine import Request
from swift_megatron_grpo.generation.requests import infer_request, request_config
from swift_megatron_grpo.types import Prompt, Rollout


def sample(
    engine: GRPOVllmEngine, requests: Sequence[Request], sampling: SamplingConfig, weights_version: int
) -> list[Rollout]:
    """One completion for each request, in order."""
    encoded = _encode(engine, [request.prompt for request in requests])
    adapter = engine._get_grpo_lora_request()
    for number, request in enumerate(requests):
        inputs = encoded[request.prompt.prompt_id]
        params = _sampling_params(engine, inputs, sampling, request.seed)
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
                logprobs=_logprobs(answer),
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


def _sampling_params(
    engine: GRPOVllmEngine, inputs: dict[str, Any], sampling: SamplingConfig, seed: int | None
) -> SamplingParams:
    request = request_config(sampling, seed)
    engine.set_default_max_tokens(request, inputs)
    params = engine._prepare_generation_config(request)
    engine._add_stop_words(params, request)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    # A stop word that is one token ends a completion as a token; only longer ones have to be looked for in the text.
    params.stop = [word for word in params.stop if not engine._get_stop_token_ids([word])]
    params.detokenize = bool(params.stop)
    return params


def _logprobs(answer: Any) -> list[float]:
    """[c]. Only the sampled token's was asked for, so there is one for each position."""
    values: list[float] = list(answer.logprobs.logprobs)
    assert len(values) == len(answer.token_ids)
    return values
