"""What ms-swift's schedulers are handed and hand back: turns that are kept, and the end of a conversation for which the
engine has no room left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from swift_megatron_grpo.conversations.turns import Conversation, Message, Turn, join


@dataclass(frozen=True, slots=True)
class Finished:
    conversation: Conversation
    messages: list[dict[str, Any]]  # all of it, as text; the last is the assistant's
    infos: dict[str, Any]  # what scheduler and environment say of it, and num_turns
    finish_reason: str  # of the last turn


def turn_of(response: ChatCompletionResponse) -> Turn:
    choice = response.choices[0]
    logprobs = None if choice.logprobs is None else [token["logprob"] for token in choice.logprobs["content"]]
    return Turn(list(response.prompt_token_ids), list(choice.token_ids), logprobs)


def finish(output: RolloutOutput, turns: Sequence[Turn], decode: Callable[[list[int]], str]) -> Finished:
    choice = output.response.choices[0]
    said = [
        Message(list(ids), [bool(value) for value in mask])
        for ids, mask in zip(output.response_token_ids, output.response_loss_mask, strict=False)
    ]
    messages = output.messages or []
    if isinstance(choice, _NoRoom):
        messages = _answered(messages)
    messages = [{**message, "content": _as_text(message["content"], decode)} for message in messages]
    conversation = join(turns, said)
    lost = {"lost_turns": conversation.lost_turns} if conversation.lost_turns else {}
    infos = {**output.rollout_infos, "num_turns": len(turns), **lost}
    return Finished(conversation, messages, infos, choice.finish_reason)


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the question that there was no room to answer, and the nothing that followed it."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and message["content"]]
    return messages[: answers[-1] + 1] if answers else messages


def _as_text(content: Any, decode: Callable[[list[int]], str]) -> Any:
    """ms-swift's loops put the tokens of earlier turns where their text was."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        return decode(content)
    return content


# ---- room


class _NoRoom(ChatCompletionResponseChoice):
    """Stands for the answer that there was no room for."""


def has_room(tokens: int, offset: int, max_model_len: int) -> bool:
    """For at least one token after so many. `offset`: ms-swift's max_tokens_offset."""
    return tokens - offset < max_model_len


def no_answer(request: RolloutInferRequest) -> ChatCompletionResponse:
    message = ChatMessage(role="assistant", content="")
    choice = _NoRoom(index=0, message=message, finish_reason="length", token_ids=[])
    usage = UsageInfo(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    return ChatCompletionResponse(model="", choices=[choice], usage=usage, id=request.uuid)


def no_first_turn(requests: Sequence[RolloutInferRequest]) -> ValueError:
    return ValueError(
        f"the first prompt of {len(requests)} conversations leaves no room for an answer; use a larger "
        f"--vllm_max_model_len. It begins: {str(requests[0].messages)[:200]}"
    )


def end_without_room(scheduler: MultiTurnScheduler) -> None:
    """A conversation that has grown too long for the engine ends, whatever its environment wants."""
    theirs = scheduler.on_turn_end

    async def on_turn_end(
        request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> dict[str, Any]:
        if isinstance(choice, _NoRoom):
            return {"done": True, "response_token_ids": [], "response_loss_mask": []}
        said: dict[str, Any] = await theirs(request, choice, turn)
        return said

    scheduler.on_turn_end = on_turn_end


async def close_environment(scheduler: MultiTurnScheduler, uuid: str) -> None:
    """ms-swift closes an environment that says it is done, and none whose conversation ends otherwise."""
    if isinstance(scheduler, GYMScheduler):
        await scheduler._close_and_remove(uuid)
