"""Completions from the server's vLLM engine, one request at a time, with the sampling of vllm/sampling.py."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any
from weakref import WeakValueDictionary

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import Completion, InvalidRequest
from swift_megatron_grpo.generation.vllm.sampling import sampling_params, to_completion

logger = get_logger()


class Completer:
    def __init__(self, engine: GRPOVllmEngine) -> None:
        self._engine = engine
        # Completions of one prompt arrive together and share its encoding while at least one of them needs it.
        self._encodings: WeakValueDictionary[str, asyncio.Future[dict[str, Any]]] = WeakValueDictionary()

    async def complete(self, request: dict[str, Any], sampling: dict[str, Any]) -> Completion:
        """Generate one completion from ms-swift's request and sampling. Cancelling it aborts the request in vLLM."""
        engine = self._engine
        inputs = await self._encoded(request)
        try:
            params = sampling_params(engine, inputs, RequestConfig(**sampling))
        except ValueError as error:  # no room for a token, or a value that vLLM excludes
            raise InvalidRequest(str(error)) from error
        adapter = await engine._get_grpo_lora_request_async()
        try:
            results = [
                result
                async for result in engine._add_request(inputs, params, uuid.uuid4().hex, adapter_request=adapter)
            ]
        except ValueError as error:  # vLLM validates prompts and parameters once more, before its core receives them
            raise InvalidRequest(str(error)) from error
        [result] = results
        return to_completion(engine, inputs, result)

    async def _encoded(self, request: dict[str, Any]) -> dict[str, Any]:
        """Encode the prompt. Templates raise errors of any type for messages that they do not support."""
        encoding = self._encode(request)
        try:
            return await asyncio.shield(encoding)  # other requests may wait for the same encoding
        except Exception as error:
            logger.warning("a prompt cannot be encoded", exc_info=True)
            raise InvalidRequest(
                f"the template cannot encode the prompt ({type(error).__name__}; the server's log has the reason)"
            ) from error

    def _encode(self, request: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        # the uuid is not part of the prompt, and other clients give every request its own
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
