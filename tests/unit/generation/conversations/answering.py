"""An engine with fixed answers, and agents that call it at the proxy's real address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swift.infer_engine.protocol import (
    ChatCompletionMessageToolCall,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Function,
    RequestConfig,
    RolloutInferRequest,
    UsageInfo,
)
from swift.rollout import multi_turns

from swift_megatron_grpo.generation.conversations.agents import register_agent
from swift_megatron_grpo.generation.conversations.running import Conversations, current
from swift_megatron_grpo.generation.protocol.messages import Completion

USER = {"role": "user", "content": "1+1?"}
ADD = Function(name="add", arguments='{"a": 1}')


class Engine:
    """Answers every call with the next token, and its text; waits for `go` before each answer."""

    tokenizer = None

    def __init__(self) -> None:
        self.requests: list[RolloutInferRequest] = []
        self.sampling: list[RequestConfig] = []
        self.template = self
        self.go = asyncio.Event()
        self.go.set()
        self.cancelled = 0
        self.tool_call: Function | None = None
        self.error: Exception | None = None

    def encode(self, request: RolloutInferRequest, **_: Any) -> dict[str, Any]:
        return {"input_ids": self.tokens(request)}

    def _get_response_prefix(self, inputs: Any) -> str:
        return ""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return f"answer {tokens[0] - 100}"

    def tokens(self, request: RolloutInferRequest) -> list[int]:
        """Encode a text as its length, and keep tokens."""
        contents = [message["content"] for message in request.messages]
        return [token for each in contents for token in (each if isinstance(each, list) else [len(each)])]

    async def infer_async(self, request: RolloutInferRequest, config: RequestConfig, **_: Any) -> Any:
        turns = current.get()
        assert turns is not None
        self.requests.append(request)
        number = len(self.requests)

        async def infer(config: RequestConfig) -> ChatCompletionResponse:
            self.sampling.append(config)
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if self.error is not None:
                raise self.error
            calls = [ChatCompletionMessageToolCall(self.tool_call)] if self.tool_call else None
            message = ChatMessage(role="assistant", content=f"answer {number}", tool_calls=calls)
            logprobs = {"content": [{"logprob": -1.0}]}
            choice = ChatCompletionResponseChoice(0, message, "stop", logprobs, token_ids=[100 + number])
            return ChatCompletionResponse(
                "", [choice], UsageInfo(1, 1, 2), prompt_token_ids=self.tokens(request), id="vllm"
            )

        return await turns.generate(request, config, infer, frozenset())


async def complete(
    engine: Engine, agent: Any, seconds: float = 20.0, most: int | None = None, limit: int | None = None, many: int = 1
) -> list[Completion]:
    register_agent("agent", seconds)(agent)
    conversations = Conversations(multi_turns["agent"](infer_engine=engine, max_turns=most, tokenizer=engine))
    sampling = RequestConfig(max_tokens=9, logprobs=True, seed=5)
    requests = [RolloutInferRequest(messages=[dict(USER)], uuid=f"0-{i}", data_dict={"number": i}) for i in range(many)]
    return list(await asyncio.gather(*(conversations.complete(each, sampling, limit) for each in requests)))


def run(engine_of: Callable[[], Engine], agent: Any, **options: Any) -> tuple[Engine, list[Completion]]:
    async def main() -> tuple[Engine, list[Completion]]:
        engine = engine_of()
        return engine, await complete(engine, agent, **options)

    return asyncio.run(main())
