"""Multi-turn conversations in the training processes, driven by a scheduler of ms-swift: tools, environments, hints.

The scheduler decides what follows a turn and when a conversation ends. ms-swift's loop calls it for all conversations
in lockstep, and the tokens of every turn are recorded. Scheduler and environments live on each engine's first rank,
which broadcasts every batch of turns to the engine's other ranks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, invoke_async_hook, multi_turns, run_multi_turn
from swift.template import Template
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.generation.conversations.scheduling import (
    close_environment,
    empty_response,
    end_without_room,
    finish,
    first_prompt_too_long,
    has_room,
    to_turn,
)
from swift_megatron_grpo.generation.conversations.turns import Turn, sampled_any, tokens_left, turn_seed
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.local.engine import LocalVllm
from swift_megatron_grpo.generation.local.sampling import run_batch
from swift_megatron_grpo.generation.protocol.messages import Completion
from swift_megatron_grpo.generation.requests import conversation_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm.images import placeholder_tokens
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.types import Rollout


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
) -> list[Completion]:
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


class MultiTurnVllm(LocalVllm):
    """A local engine whose completions are conversations."""

    def __init__(self, config: VllmConfig, turns: MultiTurnConfig, template: Template, stop: StopRequest) -> None:
        template = copy(template)
        template.max_length = None  # the prompt's limit, which would cut the conversation; max_model_len bounds that
        super().__init__(config, template, stop)
        self._scheduler = make_scheduler(turns, template)
        self._max_turns = turns.max_turns
        size = config.tensor_parallel_size
        self._first_rank = dist.get_rank() // size * size

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        if not self.share.reports:
            self._infer_broadcast_turns(sampling)
            return []

        others_wait = True  # for turns

        def infer(turns: list[NextTurn]) -> list[ChatCompletionResponse]:
            nonlocal others_wait
            self._broadcast(turns)
            others_wait = False
            responses = self._infer(turns, sampling)
            others_wait = True
            return responses

        conversations = [conversation_request(request) for request in requests]
        seeds = [request.seed for request in requests]
        limit = sampling.max_completion_length if sampling.limits_conversations else None
        placeholders = placeholder_tokens(self._engine.template)
        try:
            finished = converse(
                conversations, seeds, self._scheduler, self._max_turns, infer, self._has_room, limit, placeholders
            )
        finally:  # also if a scheduler fails; the engine fails on all its ranks
            if others_wait:
                self._broadcast(None)
        return [
            to_rollout(request, conversation, self._weights_version)
            for request, conversation in zip(requests, finished, strict=True)
        ]

    def _infer(self, turns: Sequence[NextTurn], sampling: SamplingConfig) -> list[ChatCompletionResponse]:
        """Generate one turn of each conversation like ms-swift's `infer`, but with a seed per turn."""
        engine = self._engine
        engine.template.set_mode("vllm")
        encoded, _ = engine._batch_encode([turn.request for turn in turns], strict=True)
        configs = [request_config(sampling, turn.seed) for turn in turns]
        for config, turn in zip(configs, turns, strict=True):
            config.max_tokens = turn.max_tokens or config.max_tokens

        def prepared() -> Iterator[tuple[dict[str, Any], SamplingParams]]:
            for inputs, config in zip(encoded, configs, strict=True):
                engine.set_default_max_tokens(config, inputs)
                params = engine._prepare_generation_config(config)
                engine._add_stop_words(params, config)
                params.output_kind = RequestOutputKind.FINAL_ONLY
                yield inputs, params

        outputs = run_batch(engine, prepared(), self._give_up)
        return [
            engine._create_chat_completion_response(output, inputs, config, str(number))
            for number, (output, inputs, config) in enumerate(zip(outputs, encoded, configs, strict=True))
        ]

    def _infer_broadcast_turns(self, sampling: SamplingConfig) -> None:
        """Generate every batch of turns that the engine's first rank broadcasts, until it broadcasts None."""
        while (turns := self._broadcast(None)) is not None:
            self._infer(turns, sampling)

    def _broadcast(self, turns: list[NextTurn] | None) -> list[NextTurn] | None:
        """Broadcast from the engine's first rank to its other ranks, which pass None. None ends the generation."""
        if self._engine_ranks is not None:
            box = [turns]
            dist.broadcast_object_list(box, src=self._first_rank, group=self._engine_ranks)
            turns = box[0]
        return turns

    def _has_room(self, request: RolloutInferRequest) -> bool:
        engine = self._engine
        length = engine._get_num_tokens(engine.template.encode(request))
        return has_room(length, engine.max_tokens_offset, engine.max_model_len)
