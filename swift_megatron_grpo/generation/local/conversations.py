"""Multi-turn conversations in the training processes, driven by a scheduler of ms-swift: tools, environments, hints.

The scheduler decides what follows a turn and when a conversation ends. Each conversation is a task and continues as
soon as its tool answers: its next turn joins those that vLLM generates. Between two steps of vLLM, all tasks run that
need not wait. Scheduler and environments are on each engine's first rank, which broadcasts to the others which turns
begin and which ones end early.
"""

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest
from swift.rollout import multi_turns
from swift.template import Template

from swift_megatron_grpo.generation.conversations.groups import answers_groups
from swift_megatron_grpo.generation.conversations.running import Conversations, NoRoom, current, has_room
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.local.engine import LocalVllm
from swift_megatron_grpo.generation.local.running_turns import RunningTurns
from swift_megatron_grpo.generation.protocol.messages import Completion
from swift_megatron_grpo.generation.requests import conversation_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm.images import placeholder_tokens
from swift_megatron_grpo.runtime.event_loops import run_to_end
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.types import Rollout

NextTurn = tuple[RolloutInferRequest, RequestConfig]  # to generate
_STEPS_OF_RANKS = 4  # of an engine on several ranks between two broadcasts
_MOST_ITERATIONS = 8  # of the event loop between two steps: a tool without waits takes up to five
_MOST_ENCODED = 128  # turns that are kept, each with all its tokens
_POLL_SECONDS = 1.0  # between two looks at the request to stop while all conversations wait for tools


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn that its conversation waits for."""

    turn: NextTurn
    inputs: dict[str, Any]  # encoded
    response: asyncio.Future[ChatCompletionResponse]


@dataclass(frozen=True, slots=True)
class Changes:
    """Turns that begin and turns that end early before the next step of the engine."""

    new: list[NextTurn]
    unread: list[str]  # names of turns that nobody waits for: an agent's client has gone, or its conversation has ended


def encoding_key(request: RolloutInferRequest) -> str | None:
    """Return all that a template may read of a request; None if it has media, or anything else that is not JSON."""
    if request.images or request.audios or request.videos:
        return None
    try:
        return json.dumps({name: value for name, value in vars(request).items() if name != "uuid"})
    except (TypeError, ValueError):  # ValueError: one that contains itself
        return None


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
        self.share = replace(self.share, whole_groups=answers_groups(turns.scheduler))
        self._first_rank = dist.get_rank() // size * size
        self._stop = stop
        self._steps = 1 if self._engine_ranks is None else _STEPS_OF_RANKS
        # of the generation that runs
        self._open = 0  # conversations
        self._turns = RunningTurns(self._engine)
        self._encoded: dict[str, dict[str, Any]] = {}  # the last turns that may be shared, by their keys
        self._asked: list[AskedTurn] = []  # and not yet in vLLM
        self._answers: dict[str, asyncio.Future[ChatCompletionResponse]] = {}  # that vLLM generates, by the turn's name
        self._changed = asyncio.Event()  # a conversation has asked for a turn, or ended
        self._others_wait = False  # for a broadcast

    @property
    def template(self) -> Template:
        """The template of all turns, which schedulers with their own `run` read."""
        return self._engine.template

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        self._turns, self._encoded = RunningTurns(self._engine), {}
        if not self.share.reports:
            while (changes := self._broadcast(None)) is not None:
                self._turns.abort(changes.unread)
                for request, config in changes.new:
                    self._turns.add(self._encode(request), config)
                self._turns.step(self._steps)
            self._turns.abort_all()
            return []
        with closing(asyncio.new_event_loop()) as loop:
            completions = run_to_end(loop, self._converse(requests, sampling))
        return [
            to_rollout(request, completion, self._weights_version)
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _sampled(self, rollouts: Sequence[Rollout]) -> int:
        """Return the tokens of all turns, also those that the scheduler has left out of a conversation."""
        return self._turns.tokens

    async def _converse(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Run conversations to their ends. Return their completions in order."""
        first = [place for place, request in enumerate(requests) if request.place == 0 or not self.share.whole_groups]
        groups = [requests[begin:end] for begin, end in pairwise([*first, len(requests)])]
        self._open, self._asked, self._answers, self._changed = len(groups), [], {}, asyncio.Event()
        tasks = [asyncio.create_task(self._converse_together(group, sampling)) for group in groups]
        for task in tasks:
            task.add_done_callback(self._end_one)
        completed = asyncio.gather(*tasks)  # done as well if one fails, which ends this generation
        self._others_wait = True
        try:
            while not completed.done():
                await self._let_conversations_run()
                self._stop.raise_if_out_of_time()
                if self._asked or self._answers:
                    self._step_engine()
            return list(chain.from_iterable(await completed))
        finally:
            if self._others_wait:  # otherwise the engine has failed, on all its ranks
                self._broadcast(None)
            self._turns.abort_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._conversations.closing.values())

    async def _converse_together(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Run one conversation, or those of a prompt if the scheduler answers groups."""
        conversations, config = list(map(conversation_request, requests)), request_config(sampling, requests[0].seed)
        if self.share.whole_groups:
            return await self._conversations.complete_group(conversations, config)
        limit = sampling.max_completion_length if sampling.limits_conversations else None
        return [await self._conversations.complete(conversations[0], config, limit)]

    async def _batch_infer_stream(self, conversations: Sequence[Awaitable[Any]], *_: Any) -> list[Any]:
        """Run the conversations of ms-swift's `async_infer`, which a scheduler calls for those of a prompt."""
        return await asyncio.gather(*conversations)

    async def _let_conversations_run(self) -> None:
        """Run conversations until each waits for its turn or its tool; wait for a tool if there is no turn."""
        for _ in range(_MOST_ITERATIONS):
            await asyncio.sleep(0)
            if len(self._asked) + len(self._answers) >= self._open:
                return
        if not (self._asked or self._answers):
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    def _end_one(self, task: asyncio.Task[list[Completion]]) -> None:
        self._open -= 1
        self._changed.set()

    async def infer_async(
        self, infer_request: RolloutInferRequest, config: RequestConfig, **_: Any
    ) -> ChatCompletionResponse:
        """Generate the next turn of the current conversation."""
        turns, placeholders = current.get(), placeholder_tokens(self._engine.template)
        assert turns is not None
        return await turns.generate(infer_request, config, partial(self._wait_for_turn, infer_request), placeholders)

    async def _wait_for_turn(self, request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        engine = self._engine
        inputs = self._encode(request)
        if not has_room(engine._get_num_tokens(inputs), engine.max_tokens_offset, engine.max_model_len):
            raise NoRoom
        response: asyncio.Future[ChatCompletionResponse] = asyncio.get_running_loop().create_future()
        self._asked.append(AskedTurn((request, config), inputs, response))
        self._changed.set()
        return await response

    def _encode(self, request: RolloutInferRequest) -> dict[str, Any]:
        """Encode a turn. Turns that are alike share it, such as the first ones of all conversations of a prompt."""
        key = encoding_key(request)
        encoded: dict[str, Any] | None = None if key is None else self._encoded.get(key)
        if encoded is None:
            encoded = self._engine.template.encode(request, return_template_inputs=True)
            if key is not None:
                if len(self._encoded) == _MOST_ENCODED:
                    self._encoded.clear()
                self._encoded[key] = encoded
        return encoded

    def _step_engine(self) -> None:
        """Let the engine step with the turns that conversations wait for, on all its ranks."""
        asked, self._asked = [turn for turn in self._asked if not turn.response.cancelled()], []
        unread = [name for name, response in self._answers.items() if response.cancelled()]
        self._broadcast(Changes([turn.turn for turn in asked], unread))
        self._others_wait = False
        self._turns.abort(unread)
        for name in unread:
            del self._answers[name]
        for turn in asked:
            _, config = turn.turn
            self._answers[self._turns.add(turn.inputs, config)] = turn.response
        for name, response in self._turns.step(self._steps).items():
            self._answers.pop(name).set_result(response)
        self._others_wait = True

    def _broadcast(self, changes: Changes | None) -> Changes | None:
        """Broadcast from the engine's first rank to its other ranks, which pass None. None ends the generation."""
        if self._engine_ranks is None:
            return changes
        # mostly 0, for a fifth of the time of an object
        number = torch.tensor([-1 if changes is None else len(changes.new) + len(changes.unread)])
        dist.broadcast(number, src=self._first_rank, group=self._engine_ranks)
        if number <= 0:
            return None if number < 0 else Changes([], [])
        box = [changes]
        dist.broadcast_object_list(box, src=self._first_rank, group=self._engine_ranks)
        return box[0]
