"""Turns of conversations in a local engine. Every rank of it adds and removes the same turns before the same step."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponse

from swift_megatron_grpo.generation.vllm.sampling import read_at_the_end


class RunningTurns:
    """The turns of one generation, by the names that vLLM has for them."""

    def __init__(self, engine: GRPOVllmEngine) -> None:
        engine.template.set_mode("vllm")
        self._engine, self._adapter = engine, engine._get_grpo_lora_request()
        self._names = map(str, count())
        self._running: dict[str, tuple[dict[str, Any], RequestConfig]] = {}
        self.tokens = 0  # of turns that have ended, also of those that were removed

    def add(self, inputs: dict[str, Any], config: RequestConfig) -> str:
        """Add an encoded turn to the next step, and return its name."""
        engine = self._engine
        engine.set_default_max_tokens(config, inputs)
        params = engine._prepare_generation_config(config)
        engine._add_stop_words(params, config)
        read_at_the_end(engine, params)
        name = next(self._names)
        engine._add_request(inputs, params, name, adapter_request=self._adapter)
        self._running[name] = inputs, config
        return name

    def step(self, times: int) -> dict[str, ChatCompletionResponse]:
        """Let the engine step, so many times or until it has generated all, and return the turns that have ended."""
        vllm = self._engine.engine
        ended = []
        for _ in range(times):
            if not vllm.has_unfinished_requests():
                break
            ended += vllm.step()
        return {output.request_id: self._response(output) for output in ended}

    def _response(self, output: Any) -> ChatCompletionResponse:
        """Return vLLM's output like ms-swift's `infer`."""
        inputs, config = self._running.pop(output.request_id)
        self.tokens += sum(len(sampled.token_ids) for sampled in output.outputs)
        return self._engine._create_chat_completion_response(output, inputs, config, output.request_id)

    def abort(self, names: Sequence[str]) -> None:
        """Remove these turns, which have not ended."""
        if not names:
            return
        vllm, removed = self._engine.engine, set(names)
        states = vllm.output_processor.request_states
        for inner_name, request in vllm.engine_core.engine_core.scheduler.requests.items():
            if inner_name in states and states[inner_name].external_req_id in removed:
                self.tokens += request.num_output_tokens
        vllm.abort_request(list(names))
        for name in names:
            del self._running[name]

    def abort_all(self) -> None:
        """Remove the turns that have not ended, after which the engine is idle."""
        self.abort(list(self._running))
