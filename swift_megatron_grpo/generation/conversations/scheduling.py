"""Conversion of what ms-swift's schedulers take and return: turns to keep, finished conversations, and the end of a
conversation for which the engine has no room left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from swift.rollout import MultiTurnScheduler
from swift.rollout.multi_turn import GYMScheduler

from swift_megatron_grpo.generation.conversations.turns import Message, Turn, join
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS, Completion


def to_turn(response: ChatCompletionResponse) -> Turn:
    choice = response.choices[0]
    logprobs = None if choice.logprobs is None else [token["logprob"] for token in choice.logprobs["content"]]
    return Turn(list(response.prompt_token_ids), list(choice.token_ids), logprobs, choice.routed_experts)


def finish(output: RolloutOutput, turns: Sequence[Turn], decode: Callable[[list[int]], str]) -> Completion:
    """Combine a scheduler's output with the recorded turns; the completion starts at the first trained token."""
    choice = output.response.choices[0]
    masked = [
        Message(list(ids), [bool(value) for value in mask])
        for ids, mask in zip(output.response_token_ids, output.response_loss_mask, strict=False)
    ]
    messages = output.messages or []
    if isinstance(choice, _NoRoom):
        messages = _drop_unanswered(messages)
    messages = [{**message, "content": _as_text(message["content"], decode)} for message in messages]
    conversation = join(turns, masked)
    lost = {"lost_turns": conversation.lost_turns} if conversation.lost_turns else {}
    return Completion(
        prompt_ids=conversation.prompt_ids,
        completion_ids=conversation.completion_ids,
        logprobs=conversation.logprobs,
        text=messages[-1]["content"],
        finish_reason="length" if choice.finish_reason == "length" else "stop",  # schedulers may report others
        weights_version=NO_WEIGHTS,  # set by the engine
        sampled=conversation.sampled,
        messages=messages,
        infos={**output.rollout_infos, "num_turns": len(turns), **lost},
        routed_experts=conversation.routed_experts,
    )


def _drop_unanswered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the last user message if there was no room for a response, and the empty response after it."""
    ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant" and message["content"]]
    return messages[: ends[-1]] if ends else messages


def _as_text(content: Any, decode: Callable[[list[int]], str]) -> Any:
    """Decode token ids, with which ms-swift's loops replace the text of earlier turns."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        return decode(content)
    return content


# ---- room for another turn


class _NoRoom(ChatCompletionResponseChoice):
    """Placeholder for a response that did not fit into the engine."""


def has_room(tokens: int, offset: int, max_model_len: int) -> bool:
    """Return True if at least one more token fits. `offset`: ms-swift's max_tokens_offset."""
    return tokens - offset < max_model_len


def empty_response(request: RolloutInferRequest) -> ChatCompletionResponse:
    """Create the response to a prompt that leaves no room for a completion."""
    message = ChatMessage(role="assistant", content="")
    choice = _NoRoom(index=0, message=message, finish_reason="length", token_ids=[])
    usage = UsageInfo(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    return ChatCompletionResponse(model="", choices=[choice], usage=usage, id=request.uuid)


def end_without_room(scheduler: MultiTurnScheduler) -> None:
    """Make the scheduler end conversations that have outgrown the engine, even if the environment would continue."""
    original = scheduler.on_turn_end

    async def on_turn_end(
        request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> dict[str, Any]:
        if isinstance(choice, _NoRoom):
            return {"done": True, "response_token_ids": [], "response_loss_mask": []}
        result: dict[str, Any] = await original(request, choice, turn)
        return result

    scheduler.on_turn_end = on_turn_end


async def close_environment(scheduler: MultiTurnScheduler, uuid: str) -> None:
    """Close the environment of a conversation; ms-swift closes only those that report that they are done."""
    if isinstance(scheduler, GYMScheduler):
        await scheduler._close_and_remove(uuid)
