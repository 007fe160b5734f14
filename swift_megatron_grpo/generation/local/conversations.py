"""Multi-turn conversations in the training processes.

Scheduler and environments live on each engine's first rank, which broadcasts every batch of turns to the engine's
other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch.distributed as dist
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest
from swift.template import Template
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.generation.conversations.scheduling import has_room
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.local.engine import LocalVllm
from swift_megatron_grpo.generation.local.sampling import run_batch
from swift_megatron_grpo.generation.local.turn_loop import NextTurn, converse, make_scheduler
from swift_megatron_grpo.generation.requests import conversation_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm.images import placeholder_tokens
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.types import Rollout


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
            to_rollout(request, conversation.to_completion(self._weights_version))
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
