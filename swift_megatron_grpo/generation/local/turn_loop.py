"""Conversations of several turns, which one of ms-swift's schedulers leads: tools, environments, hints.

The scheduler says what comes next and when it is over; ms-swift's loop calls it, for all conversations in step. Tokens
are kept here, turn by turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, invoke_async_hook, multi_turns, run_multi_turn
from swift.template import Template

from swift_megatron_grpo.config import MultiTurnConfig
from swift_megatron_grpo.conversations.scheduling import (
    Finished,
    close_environment,
    end_without_room,
    finish,
    no_answer,
    no_first_turn,
    turn_of,
)
from swift_megatron_grpo.conversations.turns import Turn, turn_seed


@dataclass(frozen=True, slots=True)
class NextTurn:
    """An answer that is wanted of the engine."""

    request: RolloutInferRequest
    seed: int | None


Infer = Callable[[list[NextTurn]], list[ChatCompletionResponse]]
HasRoom = Callable[[RolloutInferRequest], bool]


def make_scheduler(config: MultiTurnConfig, template: Template) -> MultiTurnScheduler:
    options = {} if config.gym_env is None else {"gym_env": config.gym_env}
    scheduler: MultiTurnScheduler = multi_turns[config.scheduler](
        max_turns=config.max_turns, tokenizer=template.tokenizer, template=template, **options
    )
    end_without_room(scheduler)
    return scheduler


def converse(
    requests: list[RolloutInferRequest],
    seeds: Sequence[int | None],
    scheduler: MultiTurnScheduler,
    max_turns: int | None,
    infer: Infer,
    has_room: HasRoom,
) -> list[Finished]:
    """`infer` answers a turn of the conversations that still go on; `has_room` tells whether one can go on at all."""
    turns: dict[str, list[Turn]] = defaultdict(list)
    uuids = [request.uuid for request in requests]
    seed_of = dict(zip(uuids, seeds, strict=True))

    def next_turn(pending: list[RolloutInferRequest], _: object = None) -> list[RolloutOutput]:
        going = {request.uuid: request for request in pending if has_room(request)}
        without_any = [request for request in pending if request.uuid not in going and request.uuid not in turns]
        if without_any:
            raise no_first_turn(without_any)
        asked = [NextTurn(each, turn_seed(seed_of[uuid], len(turns[uuid]) + 1)) for uuid, each in going.items()]
        answers = dict(zip(going, infer(asked) if asked else [], strict=True))
        for uuid, answer in answers.items():
            turns[uuid].append(turn_of(answer))
        return [RolloutOutput(response=answers.get(request.uuid) or no_answer(request)) for request in pending]

    try:
        invoke_async_hook(scheduler.on_trajectory_start(requests))
        first = next_turn(requests)
        outputs = run_multi_turn(requests, first, scheduler, next_turn, request_config=None, max_turns=max_turns)
    finally:
        invoke_async_hook(_close(scheduler, uuids))
    decode = scheduler.tokenizer.decode
    return [finish(output, turns[uuid], decode) for uuid, output in zip(uuids, outputs, strict=True)]


async def _close(scheduler: MultiTurnScheduler, uuids: Sequence[str]) -> None:
    await asyncio.gather(*(close_environment(scheduler, uuid) for uuid in uuids))
