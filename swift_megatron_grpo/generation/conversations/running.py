"""Runs conversations with a scheduler of ms-swift, which requests one turn after the other from its engine.

Conversations run concurrently; each is a task. The scheduler's `run` may be ms-swift's or its own. The engine generates
a turn through the recorder of the current conversation, which keeps the tokens that the engine saw and sampled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from swift.infer_engine import RequestConfig
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
from swift.template import MaxLengthError

from swift_megatron_grpo.generation.conversations.blocking import run_blocking_tools_in_threads
from swift_megatron_grpo.generation.conversations.groups import overrides_async_infer, turns_of
from swift_megatron_grpo.generation.conversations.turns import (
    Message,
    Turn,
    branches,
    join,
    sampled_any,
    tokens_left,
    turn_seed,
)
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS, Completion, InvalidRequest, SentSequence
from swift_megatron_grpo.types import Span

_MOST_WITHOUT_ROOM = 1000  # turns that a scheduler may ask for in a group, of which other conversations may continue


class NoRoom(Exception):
    """The prompt of this turn already has the maximum length of the engine's sequences."""


class TurnRecorder:
    """Generates the turns of a conversation, or of a group of them at the same time.

    `of_row`: the recordings and videos that a turn may have.
    """

    def __init__(
        self,
        sampling: RequestConfig,
        tokens_of_all_turns: int | None,
        of_row: Sequence[Any] = (),
        of_group: bool = False,
    ) -> None:
        self.recorded: list[Turn] = []
        self.tokens_of_all_turns = tokens_of_all_turns
        self.continues = False  # the last turn continued the assistant message of the turn before
        self.spans: list[Span] | None = None  # of the last turn, from the engine
        self._seed, self._logprobs = sampling.seed, sampling.logprobs
        self._of_row = list(of_row)
        self._requested = 0
        self._unanswered, self._most_unanswered = 0, _MOST_WITHOUT_ROOM if of_group else 0

    async def generate(
        self,
        request: RolloutInferRequest,
        config: RequestConfig,
        infer: Callable[[RequestConfig], Awaitable[ChatCompletionResponse]],
        placeholders: frozenset[int],
    ) -> ChatCompletionResponse:
        """Generate the next turn. A conversation without room for it gets an empty response, which ends it.

        So does one with media in which the policy has sampled one of the `placeholders`: the engine would put an image
        in its place. `infer` raises NoRoom or MaxLengthError.
        """
        if self._unanswered > self._most_unanswered:
            raise RuntimeError("the scheduler requested another turn of a conversation that has no room left")
        if any(medium not in self._of_row for medium in recordings_and_videos(request)):
            raise InvalidRequest(
                "the scheduler added a recording or a video to a conversation; it can add images alone, and has to "
                "return all of them as rollout_infos['images']"
            )
        self._requested += 1
        logprobs = config.logprobs or self._logprobs  # a scheduler may read them where the run does not
        config = replace(config, seed=turn_seed(self._seed, self._requested), return_details=True, logprobs=logprobs)
        left = tokens_left(self.tokens_of_all_turns, self.recorded)
        media = [*request.images, *request.videos, *request.audios]
        if left == 0 or (media and sampled_any(placeholders, self.recorded)):
            self._unanswered += 1
            return empty_response(request)
        if left is not None:
            config = replace(config, max_tokens=min(config.max_tokens or left, left))
        try:
            response = await infer(config)
        except (NoRoom, MaxLengthError) as error:
            if not self.recorded:
                flag = "--max_length" if isinstance(error, MaxLengthError) else "--vllm_max_model_len"
                raise InvalidRequest(
                    f"the first prompt leaves no room for an answer; start vLLM with a larger {flag}. It begins: "
                    f"{str(request.messages)[:200]}"
                ) from None
            self._unanswered += 1
            return empty_response(request)
        turn = replace(to_turn(response), spans=self.spans)
        self.recorded.append(turn if self._logprobs else replace(turn, logprobs=None))
        return response


def recordings_and_videos(request: RolloutInferRequest) -> list[Any]:
    return [*request.audios, *request.videos]


current: ContextVar[TurnRecorder | None] = ContextVar("current", default=None)  # of the conversation that runs


class Conversations:
    def __init__(self, scheduler: MultiTurnScheduler) -> None:
        self._scheduler = scheduler
        self.answers_groups = overrides_async_infer(type(scheduler))
        run_blocking_tools_in_threads(scheduler)
        end_without_room(scheduler)
        if type(scheduler).run is MultiTurnScheduler.run:
            _add_answer_prefix_to_steps(scheduler)
        self._running: dict[str, asyncio.Task[Any]] = {}  # by uuid
        self.closing: dict[str, asyncio.Task[None]] = {}  # environments, by the uuid of their conversation

    async def complete(
        self, request: RolloutInferRequest, sampling: RequestConfig, tokens_of_all_turns: int | None
    ) -> Completion:
        """Run a conversation to its end."""
        turns = TurnRecorder(sampling, tokens_of_all_turns, recordings_and_videos(request))
        returned = await self._run([request], turns, partial(self._scheduler.run, request, sampling))
        return finish(_checked(returned, turns.recorded), turns.recorded, self._scheduler.tokenizer.decode)

    async def complete_group(
        self, requests: Sequence[RolloutInferRequest], sampling: RequestConfig
    ) -> list[Completion]:
        """Let a scheduler that answers groups run all conversations of a prompt to their ends."""
        turns = TurnRecorder(sampling, None, of_group=True)
        scheduled = partial(self._scheduler.async_infer, list(requests), sampling, use_tqdm=False)
        outputs = await self._run(requests, turns, scheduled)
        if len(outputs) != len(requests):
            raise InvalidRequest(
                f"the scheduler returned {len(outputs)} conversations for the {len(requests)} completions of a prompt; "
                "make it return as many as --num_generations says, and --num_generations_eval for an evaluation"
            )
        decode = self._scheduler.tokenizer.decode
        chains = [turns_of(output, turns.recorded) for output in outputs]
        return [
            finish(_checked(output, chain), chain, decode, of_branch=True)
            for output, chain in zip(outputs, chains, strict=True)
        ]

    async def _run(
        self, requests: Sequence[RolloutInferRequest], turns: TurnRecorder, scheduled: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Await the scheduler. A repeated request cancels the first, whose client no longer waits.

        It begins once the environment of the first is closed, whose rewards ms-swift removes by their uuid then.
        """
        names = [request.uuid for request in requests]
        uuid = names[0]
        while earlier := [of[name] for of in (self._running, self.closing) for name in names if name in of]:
            if uuid in self._running:
                self._running[uuid].cancel()
            await asyncio.wait(earlier)
        task = asyncio.current_task()
        assert task is not None
        self._running[uuid] = task
        current.set(turns)  # for this task, and for tasks that the scheduler creates in it
        try:
            return await scheduled()
        except BaseException as error:
            if isinstance(error, Exception) or task.cancelling():
                raise
            # sys.exit() would end the event loop and with it the process. A leaked cancellation would look like ours.
            kind = type(self._scheduler).__name__
            raise RuntimeError(f"the scheduler {kind}, or its tool, raised {type(error).__name__}: {error}") from error
        finally:
            del self._running[uuid]
            for request in requests:
                closing = asyncio.create_task(close_environment(self._scheduler, request.uuid))  # may be slow
                self.closing[request.uuid] = closing
                closing.add_done_callback(partial(self.closing.pop, request.uuid))


def _add_answer_prefix_to_steps(scheduler: MultiTurnScheduler) -> None:
    """Prepend the template's response prefix to the tokens that the scheduler's step() returns.

    A template may put a prefix in front of every response (`<think></think>`), which the policy saw when it sampled.
    ms-swift's other loop prepends the prefix's tokens to those returned by step(), but run() does not: the next turn
    would see a different prefix.
    """
    append, step = scheduler.append_assistant_completion, scheduler.step

    def append_assistant_completion(request: RolloutInferRequest, completion: str) -> bool:
        continues: bool = append(request, completion)
        turns = current.get()
        if turns is not None:
            turns.continues = continues
        return continues

    def step_with_prefix(
        request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> dict[str, Any]:
        result: dict[str, Any] = step(request, choice, turn)
        turns = current.get()
        if turns is None or result.get("response_token_ids") is None:
            return result
        ids, mask = scheduler.get_response_token_data(
            request, choice, turns.continues, result["response_token_ids"], result.get("response_loss_mask")
        )
        return {**result, "response_token_ids": ids, "response_loss_mask": mask}

    scheduler.append_assistant_completion, scheduler.step = append_assistant_completion, step_with_prefix


def _checked(returned: RolloutOutput | list[RolloutOutput], turns: list[Turn]) -> list[RolloutOutput]:
    """Validate the result of a scheduler's run(), which a scheduler may override."""
    outputs = returned if isinstance(returned, list) else [returned]
    if not outputs or outputs[-1].messages is None or not turns:
        missing = "messages" if turns else "turns, because it never called infer_engine.infer_async"
        raise ValueError(f"the scheduler's run() returned {len(outputs)} outputs without {missing}")
    return outputs


# ---- what schedulers take and return


def to_turn(response: ChatCompletionResponse) -> Turn:
    choice = response.choices[0]
    logprobs = None if choice.logprobs is None else [token["logprob"] for token in choice.logprobs["content"]]
    return Turn(list(response.prompt_token_ids), list(choice.token_ids), logprobs, choice.routed_experts)


def finish(
    outputs: Sequence[RolloutOutput],
    turns: Sequence[Turn],
    decode: Callable[[list[int]], str],
    of_branch: bool = False,
) -> Completion:
    """Combine a scheduler's outputs with the recorded turns; a sequence is trained from its first sampled token on.

    Several outputs are of turns in contexts of their own, each of which is trained: every turn is. So is every turn of
    a branch. Otherwise one output is the whole conversation, which leaves out what the scheduler has rewritten.
    """
    output = outputs[-1]
    choice = output.response.choices[0]
    masked = [
        Message(list(ids), [bool(value) for value in mask])
        for each in outputs
        for ids, mask in zip(each.response_token_ids, each.response_loss_mask, strict=False)
    ]
    messages = output.messages or []
    if isinstance(choice, _Unanswered):  # drop the empty response, and the user's message that it should have answered
        ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant" and message["content"]]
        messages = messages[: ends[-1]] if ends else messages
    messages = [{**message, "content": _as_text(message["content"], decode)} for message in messages]
    *earlier, last = branches(turns, masked) if of_branch or len(outputs) > 1 else [join(turns, masked)]
    lost = {"lost_turns": last.lost_turns} if last.lost_turns else {}
    return Completion(
        prompt_ids=last.prompt_ids,
        completion_ids=last.completion_ids,
        logprobs=last.logprobs,
        text=messages[-1]["content"],
        finish_reason="length" if choice.finish_reason == "length" else "stop",  # schedulers may report others
        weights_version=NO_WEIGHTS,  # set by the engine
        sampled=last.sampled,
        messages=messages,
        infos={**output.rollout_infos, "num_turns": len(turns), **lost},
        spans=last.spans,
        routed_experts=last.routed_experts,
        earlier=tuple(
            SentSequence(each.prompt_ids, each.completion_ids, each.logprobs, each.sampled, each.spans)
            for each in earlier
        ),
    )


def _as_text(content: Any, decode: Callable[[list[int]], str]) -> Any:
    """Decode token ids, with which ms-swift's loops replace the text of earlier turns."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        return decode(content)
    return content


# ---- room for another turn


class _Unanswered(ChatCompletionResponseChoice):
    """Placeholder for a response that did not fit into the engine."""


def has_room(tokens: int, offset: int, max_model_len: int) -> bool:
    """Return True if at least one more token fits. `offset`: ms-swift's max_tokens_offset."""
    return tokens - offset < max_model_len


def empty_response(request: RolloutInferRequest) -> ChatCompletionResponse:
    """Create the response to a prompt that leaves no room for a completion."""
    message = ChatMessage(role="assistant", content="")
    choice = _Unanswered(index=0, message=message, finish_reason="length", logprobs={"content": []}, token_ids=[])
    usage = UsageInfo(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    return ChatCompletionResponse(model="", choices=[choice], usage=usage, id=request.uuid)


def end_without_room(scheduler: MultiTurnScheduler) -> None:
    """Make the scheduler end conversations that have outgrown the engine, even if the environment would continue."""
    original = scheduler.on_turn_end

    async def on_turn_end(
        request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> dict[str, Any]:
        if isinstance(choice, _Unanswered):
            return {"done": True}
        result: dict[str, Any] = await original(request, choice, turn)
        return result

    scheduler.on_turn_end = on_turn_end


async def close_environment(scheduler: MultiTurnScheduler, uuid: str) -> None:
    """Close the environment of a conversation; ms-swift closes only those that report that they are done."""
    if isinstance(scheduler, GYMScheduler):
        await scheduler._close_and_remove(uuid)
