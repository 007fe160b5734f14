"""Multi-turn conversations in the training processes, driven by a scheduler of ms-swift: tools, environments, hints.

The scheduler decides what follows a turn and when a conversation ends. All open conversations advance in lockstep: vLLM
generates one batch of turns when each of them waits for its next one. Scheduler and environments live on each engine's
first rank, which broadcasts every batch of turns to the engine's other ranks.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from typing import Any

import torch.distributed as dist
from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest
from swift.rollout import multi_turns
from swift.template import Template
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.generation.conversations.running import Conversations, NoRoom, current, has_room
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.local.engine import LocalVllm, run_batch
from swift_megatron_grpo.generation.protocol.messages import Completion
from swift_megatron_grpo.generation.requests import conversation_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm.images import placeholder_tokens
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.types import Rollout

NextTurn = tuple[RolloutInferRequest, RequestConfig]  # to generate


class MultiTurnVllm(LocalVllm):
    """A local engine whose completions are conversations. The scheduler calls it like an engine of ms-swift."""

    def __init__(self, config: VllmConfig, turns: MultiTurnConfig, template: Template, stop: StopRequest) -> None:
        template = copy(template)
        template.max_length = None  # the prompt's limit, which would cut the conversation; max_model_len bounds that
        super().__init__(config, template, stop)
        options = {} if turns.gym_env is None else {"gym_env": turns.gym_env}
        self._conversations = Conversations(
            multi_turns[turns.scheduler](
                infer_engine=self, max_turns=turns.max_turns, tokenizer=template.tokenizer, template=template, **options
            )
        )
        size = config.vllm_tensor_parallel_size
        self._first_rank = dist.get_rank() // size * size
        self._open = 0  # conversations
        self._waiting: list[tuple[NextTurn, asyncio.Future[ChatCompletionResponse]]] = []
        self._others_wait = False  # for the next batch of turns

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        if not self.share.reports:
            while (turns := self._broadcast(None)) is not None:
                self._infer(turns)
            return []
        self._others_wait = True
        try:
            with closing(asyncio.new_event_loop()) as loop:
                completions = loop.run_until_complete(self._converse(requests, sampling))
        finally:  # also if a scheduler fails; the engine fails on all its ranks
            if self._others_wait:
                self._broadcast(None)
        return [
            to_rollout(request, completion, self._weights_version)
            for request, completion in zip(requests, completions, strict=True)
        ]

    async def _converse(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Run conversations to their ends. Return their completions in order."""
        self._open, self._waiting = len(requests), []
        limit = sampling.max_completion_length if sampling.limits_conversations else None
        tasks = [
            asyncio.create_task(
                self._conversations.complete(
                    conversation_request(request), request_config(sampling, request.seed), limit
                )
            )
            for request in requests
        ]
        for task in tasks:
            task.add_done_callback(self._end_one)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._conversations.closing)

    def _end_one(self, task: asyncio.Task[Completion]) -> None:
        self._open -= 1
        if not task.cancelled() and task.exception() is None:  # otherwise this generation ends
            self._infer_if_all_wait()

    async def infer_async(
        self, infer_request: RolloutInferRequest, config: RequestConfig, **_: Any
    ) -> ChatCompletionResponse:
        """Generate the next turn of the current conversation."""
        turns, placeholders = current.get(), placeholder_tokens(self._engine.template)
        assert turns is not None
        return await turns.generate(infer_request, config, partial(self._wait_for_turn, infer_request), placeholders)

    async def _wait_for_turn(self, request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        engine = self._engine
        length = engine._get_num_tokens(engine.template.encode(request))
        if not has_room(length, engine.max_tokens_offset, engine.max_model_len):
            raise NoRoom
        response: asyncio.Future[ChatCompletionResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append(((request, config), response))
        self._infer_if_all_wait()
        return await response

    def _infer_if_all_wait(self) -> None:
        """Generate a turn of every open conversation, once the last of them waits for its turn."""
        waiting = [(turn, response) for turn, response in self._waiting if not response.cancelled()]
        if not waiting or len(waiting) < self._open:
            return
        self._waiting = []
        waiting.sort(key=lambda turn: turn[0][0].uuid)  # environments may have been slower in another order
        turns = [turn for turn, _ in waiting]
        try:
            self._broadcast(turns)
            self._others_wait = False
            results = self._infer(turns)
            self._others_wait = True
        except BaseException as error:
            for _, response in waiting:
                response.set_exception(error)
        else:
            for (_, response), result in zip(waiting, results, strict=True):
                response.set_result(result)

    def _infer(self, turns: Sequence[NextTurn]) -> list[ChatCompletionResponse]:
        """Generate one turn of each conversation like ms-swift's `infer`, but with a seed per turn."""
        engine = self._engine
        engine.template.set_mode("vllm")
        encoded, _ = engine._batch_encode([request for request, _ in turns], strict=True)
        configs = [config for _, config in turns]

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

    def _broadcast(self, turns: list[NextTurn] | None) -> list[NextTurn] | None:
        """Broadcast from the engine's first rank to its other ranks, which pass None. None ends the generation."""
        if self._engine_ranks is not None:
            box = [turns]
            dist.broadcast_object_list(box, src=self._first_rank, group=self._engine_ranks)
            turns = box[0]
        return turns
