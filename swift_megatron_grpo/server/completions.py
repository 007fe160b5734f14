"""Completions from the server's vLLM engine, one request at a time as they come, asked as vllm_sampling.py has it."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any
from weakref import WeakValueDictionary

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest

from swift_megatron_grpo.protocol.messages import NO_WEIGHTS, Completion
from swift_megatron_grpo.vllm_shared.sampling import sampled_logprobs, sampling_params


class Completer:
    def __init__(self, engine: GRPOVllmEngine) -> None:
        self._engine = engine
        # Completions of one prompt come together, and share its encoding for as long as one of them needs it.
        self._encodings: WeakValueDictionary[str, asyncio.Future[dict[str, Any]]] = WeakValueDictionary()

    async def complete(self, request: dict[str, Any], sampling: dict[str, Any]) -> Completion:
        """Both in ms-swift's words. When it is cancelled, vLLM gives it up."""
        engine = self._engine
        encoding = self._encode(request)
        inputs = await asyncio.shield(encoding)  # others may wait for the same one
        params = sampling_params(engine, inputs, RequestConfig(**sampling))
        adapter = await engine._get_grpo_lora_request_async()
        answers = engine._add_request(inputs, params, uuid.uuid4().hex, adapter_request=adapter)
        [output] = [answer async for answer in answers]
        [answer] = output.outputs
        token_ids = list(answer.token_ids)
        return Completion(
            prompt_ids=list(output.prompt_token_ids),
            completion_ids=token_ids,
            logprobs=None if answer.logprobs is None else sampled_logprobs(answer),
            text=engine.template.decode_generate_ids(token_ids, template_inputs=inputs["template_inputs"]),
            finish_reason=answer.finish_reason,
            weights_version=NO_WEIGHTS,  # the web server knows
        )

    def _encode(self, request: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        # every request has another name, and that is not encoded
        key = json.dumps({name: value for name, value in request.items() if name != "uuid"}, sort_keys=True)
        encoding = self._encodings.get(key)
        if encoding is None:
            template = self._engine.template
            template.set_mode("vllm")
            encoding = asyncio.get_running_loop().run_in_executor(
                None, template.encode, RolloutInferRequest(**request), True
            )
            self._encodings[key] = encoding
        return encoding
