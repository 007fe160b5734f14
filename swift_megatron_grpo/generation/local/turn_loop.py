"""Multi-turn conversations driven by one of ms-swift's schedulers: tools, environments, hints.

The scheduler decides what follows a turn and when a conversation ends. ms-swift's loop calls it for all conversations
in lockstep. This module records the tokens of every turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, invoke_async_hook, multi_turns, run_multi_turn
from swift.template import Template

from swift_megatron_grpo.generation.conversations.scheduling import (
    FinishedConversation,
    close_environment,
    empty_response,
    end_without_room,
    finish,
    first_prompt_too_long,
    to_turn,
)
from swift_megatron_grpo.generation.conversations.turns import Turn, sampled_any, tokens_left, turn_seed
from swift_megatron_grpo.settings.config import MultiTurnConfig


@dataclass(frozen=True, slots=True)
class NextTurn:
    """One turn to generate."""

    request: RolloutInferRequest
    seed: int | None
    max_tokens: int | None = None  # what earlier turns have left; None: every turn has the same limit


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
    tokens_of_all_turns: int | None = None,
    placeholders: frozenset[int] = frozenset(),
) -> list[FinishedConversation]:
    """Run conversations to their ends, in lockstep.

    `infer` generates one turn of each unfinished conversation; `has_room` returns True if another turn fits. A
    conversation whose turns have used up `tokens_of_all_turns` ends like one without room, and so does one with images
    in which the policy has sampled one of the `placeholders`: the engine would put an image in its place.
    """
    turns: dict[str, list[Turn]] = defaultdict(list)
    uuids = [request.uuid for request in requests]
    seed_of = dict(zip(uuids, seeds, strict=True))

    def next_turn(pending: list[RolloutInferRequest], _: object = None) -> list[RolloutOutput]:
        left = {request.uuid: tokens_left(tokens_of_all_turns, turns[request.uuid]) for request in pending}
        ended = {
            request.uuid
            for request in pending
            if left[request.uuid] == 0 or (request.images and sampled_any(placeholders, turns[request.uuid]))
        }
        fitting = {request.uuid: request for request in pending if request.uuid not in ended and has_room(request)}
        too_long = [request for request in pending if request.uuid not in fitting and not turns[request.uuid]]
        if too_long:
            raise first_prompt_too_long(too_long)
        batch = [
            NextTurn(request, turn_seed(seed_of[uuid], len(turns[uuid]) + 1), left[uuid])
            for uuid, request in fitting.items()
        ]
        responses = dict(zip(fitting, infer(batch) if batch else [], strict=True))
        for uuid, response in responses.items():
            turns[uuid].append(to_turn(response))
        return [RolloutOutput(response=responses.get(request.uuid) or empty_response(request)) for request in pending]

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
