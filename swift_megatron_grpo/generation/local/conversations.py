"""Conversations of several turns in the training processes: the scheduler and the environments live in each engine's
first rank, and the other ranks of the engine are told what to generate."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch.distributed as dist
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest
from swift.template import Template
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.conversations.scheduling import Finished, has_room
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.local.engine import LocalVllm
from swift_megatron_grpo.generation.local.turn_loop import NextTurn, converse, make_scheduler
from swift_megatron_grpo.generation.requests import conversation_request, request_config
from swift_megatron_grpo.types import Prompt, Rollout


class ConversingVllm(LocalVllm):
    def __init__(self, config: VllmConfig, turns: MultiTurnConfig, template: Template) -> None:
        template = copy(template)
        template.max_length = None  # it is the prompt's, and would cut the conversation: max_model_len bounds that
        super().__init__(config, template)
        self._scheduler = make_scheduler(turns, template)
        self._max_turns = turns.max_turns
        size = config.tensor_parallel_size
        self._engine_ranks = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._first_rank = dist.get_rank() // size * size

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        if not self.share.reports:
            self._follow(sampling)
            return []

        def infer(turns: list[NextTurn]) -> list[ChatCompletionResponse]:
            self._lead(turns)
            return self._infer(turns, sampling)

        asked = [conversation_request(request) for request in requests]
        seeds = [request.seed for request in requests]
        finished = converse(asked, seeds, self._scheduler, self._max_turns, infer, self._has_room)
        self._lead(None)
        prompts = [request.prompt for request in requests]
        return [_rollout(*each, self._weights_version) for each in zip(prompts, finished, strict=True)]

    def _infer(self, turns: Sequence[NextTurn], sampling: SamplingConfig) -> list[ChatCompletionResponse]:
        """As ms-swift's `infer`, but each with a seed of its own."""
        engine = self._engine
        engine.template.set_mode("vllm")
        encoded, _ = engine._batch_encode([turn.request for turn in turns], strict=True)
        configs = [request_config(sampling, turn.seed) for turn in turns]
        adapter = engine._get_grpo_lora_request()
        for number, (inputs, config) in enumerate(zip(encoded, configs, strict=True)):
            engine.set_default_max_tokens(config, inputs)
            params = engine._prepare_generation_config(config)
            engine._add_stop_words(params, config)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            engine._add_request(inputs, params, str(number), adapter_request=adapter)
        finished: dict[str, Any] = {}
        while engine.engine.has_unfinished_requests():
            finished.update((output.request_id, output) for output in engine.engine.step())
        return [
            engine._create_chat_completion_response(finished[str(number)], inputs, config, str(number))
            for number, (inputs, config) in enumerate(zip(encoded, configs, strict=True))
        ]

    def _follow(self, sampling: SamplingConfig) -> None:
        while (turns := self._lead(None)) is not None:
            self._infer(turns, sampling)

    def _lead(self, turns: list[NextTurn] | None) -> list[NextTurn] | None:
        """From the engine's first rank to its others."""
        if self._engine_ranks is not None:
            box = [turns]
            dist.broadcast_object_list(box, src=self._first_rank, group=self._engine_ranks)
            turns = box[0]
        return turns

    def _has_room(self, request: RolloutInferRequest) -> bool:
        engine = self._engine
        length = engine._get_num_tokens(engine.template.encode(request))
        return has_room(length, engine.max_tokens_offset, engine.max_model_len)


def _rollout(prompt: Prompt, finished: Finished, version: int) -> Rollout:
    conversation = finished.conversation
    return Rollout(
        prompt=prompt,
        prompt_ids=conversation.prompt_ids,
        completion_ids=conversation.completion_ids,
        logprobs=conversation.logprobs,
        text=finished.messages[-1]["content"],
        finish_reason=finished.finish_reason,
        weights_version=version,
        sampled=conversation.sampled,
        messages=finished.messages,
        infos=finished.infos,
    )
