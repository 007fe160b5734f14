"""Conversations behind a rollout server: one request is one conversation, led by ms-swift's scheduler from its first
turn to its last, beside all others.

The scheduler and its environments are those that ms-swift made for its own route, with `run` of its own or ms-swift's.
It asks the engine for one turn after the other, and the engine keeps for the conversation what it saw and sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    RolloutInferRequest,
    RolloutOutput,
)
from swift.rollout import MultiTurnScheduler

from swift_megatron_grpo.conversations.scheduling import (
    Finished,
    close_environment,
    end_without_room,
    finish,
    has_room,
    no_answer,
    no_first_turn,
    turn_of,
)
from swift_megatron_grpo.conversations.turns import Turn, turn_seed
from swift_megatron_grpo.protocol.messages import NO_WEIGHTS, Completion


class ConversingEngine(GRPOVllmEngine):
    """ms-swift's engine. What is asked from within a conversation is a turn of it."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **options: Any
    ) -> ChatCompletionResponse:
        turns, ask = _conversation.get(), partial(super().infer_async, infer_request, **options)
        if turns is None:
            return await ask(request_config)
        return await turns.next(infer_request, request_config or RequestConfig(), ask)

    def set_default_max_tokens(self, request_config: RequestConfig, inputs: dict[str, Any]) -> None:
        """ms-swift calls this when it has encoded the prompt."""
        length = self._get_num_tokens(inputs)
        if _conversation.get() is not None and not has_room(length, self.max_tokens_offset, self.max_model_len):
            raise _NoRoomLeft
        super().set_default_max_tokens(request_config, inputs)


class _NoRoomLeft(Exception):
    """The prompt of this turn is as long as the engine's sequences may be."""


class _Turns:
    """Of one conversation, as they come."""

    def __init__(self, seed: int | None) -> None:
        self.kept: list[Turn] = []
        self.continues = False  # the last one went on in the message of the one before
        self._seed = seed
        self._asked = 0
        self._over = False

    async def next(
        self,
        request: RolloutInferRequest,
        config: RequestConfig,
        ask: Callable[[RequestConfig], Awaitable[ChatCompletionResponse]],
    ) -> ChatCompletionResponse:
        if self._over:
            raise RuntimeError("the scheduler asks for another turn of a conversation that has no room left")
        self._asked += 1
        config = replace(config, seed=turn_seed(self._seed, self._asked), return_details=True, logprobs=True)
        try:
            answer = await ask(config)
        except _NoRoomLeft:
            if not self.kept:
                raise no_first_turn([request]) from None
            self._over = True
            return no_answer(request)
        self.kept.append(turn_of(answer))
        return answer


_conversation: ContextVar[_Turns | None] = ContextVar("conversation", default=None)


class Conversations:
    def __init__(self, scheduler: MultiTurnScheduler) -> None:
        self._scheduler = scheduler
        end_without_room(scheduler)
        if type(scheduler).run is MultiTurnScheduler.run:
            _prefix_what_steps_say(scheduler)
        self._led: dict[str, asyncio.Task[Any]] = {}  # by uuid
        self._closing: set[asyncio.Task[None]] = set()

    async def complete(self, request: dict[str, Any], sampling: dict[str, Any]) -> Completion:
        """Both in ms-swift's words. All that came after the first prompt is the completion."""
        finished = await self.lead(RolloutInferRequest(**request), RequestConfig(**sampling))
        conversation = finished.conversation
        return Completion(
            prompt_ids=conversation.prompt_ids,
            completion_ids=conversation.completion_ids,
            logprobs=conversation.logprobs,
            text=finished.messages[-1]["content"],
            finish_reason=finished.finish_reason,
            weights_version=NO_WEIGHTS,  # the web server knows
            sampled=conversation.sampled,
            messages=finished.messages,
            infos=finished.infos,
        )

    async def lead(self, request: RolloutInferRequest, sampling: RequestConfig) -> Finished:
        """To its end, in a task of its own. Who asks for the same one again no longer waits for the first answer."""
        uuid = request.uuid
        while uuid in self._led:
            self._led[uuid].cancel()
            await asyncio.wait([self._led[uuid]])
        task = asyncio.current_task()
        assert task is not None
        self._led[uuid] = task
        turns = _Turns(sampling.seed)
        _conversation.set(turns)  # for this task, and for those that the scheduler starts in it
        try:
            output = _only(await self._scheduler.run(request, sampling), turns.kept)
        finally:
            del self._led[uuid]
            self._close(uuid)
        return finish(output, turns.kept, self._scheduler.tokenizer.decode)

    def _close(self, uuid: str) -> None:
        """Nobody waits for an environment that takes its time."""
        closing = asyncio.create_task(close_environment(self._scheduler, uuid))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _prefix_what_steps_say(scheduler: MultiTurnScheduler) -> None:
    """A template may put words in front of every answer (`<think></think>`), which the policy saw when it sampled.
    ms-swift's other loop puts their tokens in front of those that a scheduler's step() gives, and run() does not: so
    the next turn would see another beginning."""
    append, step = scheduler.append_assistant_completion, scheduler.step

    def append_assistant_completion(request: RolloutInferRequest, completion: str) -> bool:
        continues: bool = append(request, completion)
        turns = _conversation.get()
        if turns is not None:
            turns.continues = continues
        return continues

    def stepped(request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int) -> dict[str, Any]:
        said: dict[str, Any] = step(request, choice, turn)
        turns = _conversation.get()
        if turns is None or said.get("response_token_ids") is None:
            return said
        ids, mask = scheduler.get_response_token_data(
            request, choice, turns.continues, said["response_token_ids"], said.get("response_loss_mask")
        )
        return {**said, "response_token_ids": ids, "response_loss_mask": mask}

    scheduler.append_assistant_completion, scheduler.step = append_assistant_completion, stepped


def _only(said: RolloutOutput | list[RolloutOutput], turns: list[Turn]) -> RolloutOutput:
    """What a `run` of the scheduler's own may get wrong."""
    outputs = said if isinstance(said, list) else [said]
    if len(outputs) != 1:
        raise ValueError(
            f"the scheduler's run() returned {len(outputs)} outputs for one request; a conversation is one sample "
            "here, with all its messages"
        )
    if outputs[0].messages is None or not turns:
        missing = "messages" if turns else "turns, because it has not asked infer_engine.infer_async for one"
        raise ValueError(f"the scheduler's run() returned an output without {missing}")
    return outputs[0]
