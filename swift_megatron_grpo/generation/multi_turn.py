"""Conversations of several turns, which one of ms-swift's schedulers leads: tools, environments, hints.

The scheduler says what comes next and when it is over; ms-swift's loop calls it. Tokens are kept here, turn by turn.
"""

from __future__ import annotations

from collections import defaultdict
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
from swift.rollout import MultiTurnScheduler, invoke_async_hook, multi_turns, run_multi_turn
from swift.template import Template

from swift_megatron_grpo.config import MultiTurnConfig
from swift_megatron_grpo.generation.turns import Conversation, Message, Turn, join

Infer = Callable[[list[RolloutInferRequest]], list[RolloutOutput]]
HasRoom = Callable[[RolloutInferRequest], bool]


@dataclass(frozen=True, slots=True)
class Finished:
    conversation: Conversation
    messages: list[dict[str, Any]]  # all of it, as text; the last is the assistant's
    infos: dict[str, Any]  # what scheduler and environment say of it, and num_turns
    finish_reason: str  # of the last turn


def make_scheduler(config: MultiTurnConfig, template: Template) -> MultiTurnScheduler:
    options = {} if config.gym_env is None else {"gym_env": config.gym_env}
    scheduler: MultiTurnScheduler = multi_turns[config.scheduler](
        max_turns=config.max_turns, tokenizer=template.tokenizer, template=template, **options
    )
    return scheduler


def converse(
    requests: list[RolloutInferRequest],
    scheduler: MultiTurnScheduler,
    max_turns: int | None,
    infer: Infer,
    has_room: HasRoom,
) -> list[Finished]:
    """`infer` answers a turn of the conversations that still go on; `has_room` tells whether one can go on at all."""
    turns: dict[str, list[Turn]] = defaultdict(list)
    ended = _EndsWithoutRoom(scheduler)

    def next_turn(pending: list[RolloutInferRequest], _: object = None) -> list[RolloutOutput]:
        going = [request for request in pending if has_room(request)]
        without_any = [request for request in pending if request not in going and request.uuid not in turns]
        if without_any:
            raise ValueError(
                f"the first prompt of {len(without_any)} conversations leaves no room for an answer; use a larger "
                f"--vllm_max_model_len. It begins: {str(without_any[0].messages)[:200]}"
            )
        answers = iter(infer(going) if going else [])
        outputs = []
        for request in pending:
            if request not in going:
                ended.uuids.add(request.uuid)
                outputs.append(_no_answer(request))
                continue
            output = next(answers)
            turns[request.uuid].append(_turn(output.response))
            outputs.append(output)
        return outputs

    invoke_async_hook(scheduler.on_trajectory_start(requests))
    first = next_turn(requests)
    outputs = run_multi_turn(requests, first, ended, next_turn, request_config=None, max_turns=max_turns)
    return [
        _finish(output, turns[request.uuid], scheduler, cut=request.uuid in ended.uuids)
        for request, output in zip(requests, outputs, strict=True)
    ]


class _EndsWithoutRoom:
    """The scheduler, but a conversation that has grown too long for the engine ends, whatever its environment wants."""

    def __init__(self, scheduler: MultiTurnScheduler) -> None:
        self._scheduler = scheduler
        self.uuids: set[str | None] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    async def on_turn_end(
        self, request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> dict[str, Any]:
        if request.uuid in self.uuids:
            return {"done": True, "response_token_ids": [], "response_loss_mask": []}
        said: dict[str, Any] = await self._scheduler.on_turn_end(request, choice, turn)
        return said


def _turn(response: ChatCompletionResponse) -> Turn:
    choice = response.choices[0]
    logprobs = None if choice.logprobs is None else [token["logprob"] for token in choice.logprobs["content"]]
    return Turn(list(response.prompt_token_ids), list(choice.token_ids), logprobs)


def _no_answer(request: RolloutInferRequest) -> RolloutOutput:
    message = ChatMessage(role="assistant", content="")
    choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="length", token_ids=[])
    usage = UsageInfo(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    return RolloutOutput(response=ChatCompletionResponse(model="", choices=[choice], usage=usage, id=request.uuid))


def _finish(output: RolloutOutput, turns: Sequence[Turn], scheduler: MultiTurnScheduler, cut: bool) -> Finished:
    said = [
        Message(list(ids), [bool(value) for value in mask])
        for ids, mask in zip(output.response_token_ids, output.response_loss_mask, strict=False)
    ]
    messages = output.messages or []
    messages = [
        {**message, "content": _as_text(message["content"], scheduler)}
        for message in (_answered(messages) if cut else messages)
    ]
    infos = {**output.rollout_infos, "num_turns": len(turns)}
    return Finished(join(turns, said), messages, infos, output.response.choices[0].finish_reason)


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the question that there was no room to answer, and the nothing that followed it."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and message["content"]]
    return messages[: answers[-1] + 1] if answers else messages


def _as_text(content: Any, scheduler: MultiTurnScheduler) -> Any:
    """ms-swift's loop puts the tokens of earlier turns where their text was."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        return scheduler.tokenizer.decode(content, skip_special_tokens=False)
    return content
