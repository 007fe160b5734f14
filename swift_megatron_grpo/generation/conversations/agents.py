"""Agents: coroutines that call the policy at an address as they would call OpenAI's, once for each rollout.

An agent is a conversation like those of a scheduler. Every call is a turn, with the tokens that the engine saw and
sampled. Calls that continue one another are one training sequence, any other call begins one. An earlier answer that an
agent sends back as it was is put into the next prompt by its tokens, so that nothing is encoded again.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

from swift_megatron_grpo.generation.conversations.blocking import in_threads
from swift_megatron_grpo.generation.conversations.chat import Answer, Call, CallRefused, before_stop, key_of
from swift_megatron_grpo.generation.conversations.proxy import Proxy
from swift_megatron_grpo.generation.conversations.running import TurnRecorder, current, empty_response
from swift_megatron_grpo.generation.conversations.turns import Turn, tokens_left, turn_seed
from swift_megatron_grpo.generation.protocol.messages import InvalidRequest
from swift_megatron_grpo.types import AGENT_ERROR

Agent = Callable[[dict[str, Any], str, str], Awaitable[float | None]]
MOST_CALLS = 1000  # of a rollout, without --max_turns
MOST_AT_ONCE = 64  # calls of a rollout
_SHOWN = 500  # characters of an agent's error
logger = get_logger()


def register_agent(name: str, seconds: float = 600.0) -> Callable[[Agent], Agent]:
    """Decorate a coroutine that `--multi_turn_scheduler NAME` runs for each rollout, in a file of `--external_plugins`.

    It gets the row of the dataset, the address of the policy, and the key of its rollout:
    `async def agent(row, base_url, api_key)`. It returns the reward, which counts with `--use_gym_env true`, or None.
    It runs in a thread of its own and may block. After `seconds`, or with an error, its completion has no valid reward.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"agent {name!r}: seconds must be a positive number, got {seconds}; use 600")

    def register(agent: Agent) -> Agent:
        if name in multi_turns:
            raise ValueError(f"there is a scheduler {name!r} already; use another name")
        if not inspect.iscoroutinefunction(agent):
            raise ValueError(f"agent {name!r} is not a coroutine; begin it with `async def`, it may block nevertheless")
        try:
            inspect.signature(agent).bind({}, "", "")
        except TypeError as error:
            raise ValueError(
                f"agent {name!r} cannot be called with a row, an address and a key ({error}); use `async def "
                f"{agent.__name__}(row, base_url, api_key)`"
            ) from None
        multi_turns[name] = type(name, (AgentScheduler,), {"agent": staticmethod(agent), "seconds": seconds})
        return agent

    return register


class AgentScheduler(MultiTurnScheduler):
    """Runs an agent where ms-swift's schedulers run a conversation."""

    agent: ClassVar[Agent]
    seconds: ClassVar[float]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._proxy: Proxy | None = None

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **_: Any
    ) -> list[RolloutOutput]:
        """Run the agent to its end. Return an output for each of its calls."""
        turns = current.get()
        assert turns is not None
        if self._proxy is None:
            self._proxy = Proxy()
        rollout = AgentRollout(self, infer_request, request_config, turns)
        row = {**deepcopy(infer_request.data_dict), "messages": deepcopy(infer_request.messages)}
        try:
            with self._proxy.serving(rollout) as key:
                ended = in_threads(_infos_of)(type(self).agent, row, self._proxy.url, key)
                infos = await asyncio.wait_for(ended, self.seconds)
        except TimeoutError:
            infos = {AGENT_ERROR: f"it did not end within {self.seconds:g} seconds"}
        finally:
            rollout.end()
        if not rollout.outputs:
            infos.setdefault(AGENT_ERROR, "it ended without an answer of the policy")
            rollout.add_empty()
        if AGENT_ERROR in infos:
            logger.warning(f"the agent of {infer_request.uuid} failed: {infos[AGENT_ERROR]}")
        *others, last = rollout.outputs
        return [*others, last.model_copy(update={"rollout_infos": infos})]


def is_agent(scheduler: str | None) -> bool:
    """Return True if this scheduler runs an agent, whose calls have messages of text alone."""
    return issubclass(multi_turns.get(scheduler, object), AgentScheduler)


@dataclass
class AgentRollout:
    """The calls of one agent. They arrive in the proxy's thread and are answered in the event loop of the engine.

    Everything that changes does so in that loop, so that a call is either running, answered or withdrawn.
    """

    scheduler: AgentScheduler
    request: RolloutInferRequest
    sampling: RequestConfig
    turns: TurnRecorder
    outputs: list[RolloutOutput] = field(default_factory=list)  # of the turns, in their order
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _calls: int = 0
    _running: dict[str, "asyncio.Task[Answer]"] = field(default_factory=dict)  # by the name of the call
    _withdrawn: set[str] = field(default_factory=set)  # names of calls
    _ended: bool = False
    _tokens: dict[str, list[int]] = field(default_factory=dict)  # of answers, by chat.key_of
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the call that may sample what is left of a limit

    def ask(self, call: Call) -> "Future[Answer]":
        """Let the policy answer."""
        return asyncio.run_coroutine_threadsafe(self._answer(call), self._loop)

    def withdraw(self, call: Call) -> None:
        """Forget a call whose answer did not reach the agent."""
        self._loop.call_soon_threadsafe(self._forget, call.name)

    def end(self) -> None:
        """Cancel the calls that are not answered, and refuse others."""
        self._ended = True
        for task in self._running.values():
            task.cancel()

    def _forget(self, name: str) -> None:
        if self._ended:
            return
        self._withdrawn.add(name)
        if name in self._running:
            self._running[name].cancel()
        places = [place for place, output in enumerate(self.outputs) if output.response.id == name]
        for place in places:
            del self.outputs[place], self.turns.recorded[place]

    async def _answer(self, call: Call) -> Answer:
        most = self.scheduler.max_turns or MOST_CALLS
        if self._ended or call.name in self._withdrawn:
            raise CallRefused("the rollout has ended", status=401)
        if self._calls >= most:
            raise CallRefused(f"a rollout has at most {most} calls (--max_turns)", code="call_limit")
        if len(self._running) >= MOST_AT_ONCE:
            raise CallRefused(f"a rollout has at most {MOST_AT_ONCE} calls at once", status=429)
        self._calls = number = self._calls + 1
        task = asyncio.current_task()
        assert task is not None
        self._running[call.name] = task
        try:
            async with AsyncExitStack() as one_at_a_time:
                if self.turns.tokens_of_all_turns is not None:
                    await one_at_a_time.enter_async_context(self._turn)
                return await self._generate(call, self._sampling(call, number))
        finally:
            del self._running[call.name]

    def _sampling(self, call: Call, number: int) -> RequestConfig:
        left = tokens_left(self.turns.tokens_of_all_turns, self.turns.recorded)
        if left == 0:
            raise CallRefused(
                "the rollout has no tokens left (--max_completion_length)", code="context_length_exceeded"
            )
        limits = [limit for limit in (self.sampling.max_tokens, call.max_tokens, left) if limit is not None]
        seed, stop = turn_seed(self.sampling.seed, number), [*(self.sampling.stop or []), *call.stop]
        return replace(self.sampling, max_tokens=min(limits, default=None), seed=seed, stop=stop)

    async def _generate(self, call: Call, sampling: RequestConfig) -> Answer:
        messages = [self._with_tokens(message) for message in call.messages]
        request = replace(self.request, messages=messages, tools=call.tools, images=[], videos=[], audios=[])
        recorder = TurnRecorder(sampling, None)
        current.set(recorder)  # of this task, which is that of the call
        try:
            response = await self.scheduler.infer_engine.infer_async(request, sampling)
        except InvalidRequest:
            reason = "the messages leave no room for an answer (--vllm_max_model_len)"
            raise CallRefused(reason, code="context_length_exceeded") from None
        except Exception as error:  # of the template, for messages that it does not know
            reason = f"the template cannot encode the messages ({type(error).__name__}: {error})"
            raise CallRefused(reason[:_SHOWN]) from error
        return self._recorded(call, request, response, recorder.recorded[0])

    def _with_tokens(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an earlier answer with its tokens in place of its text, and other messages as they are."""
        tokens = self._tokens.get(key_of(message)) if message["role"] == "assistant" else None
        return dict(message) if tokens is None else {"role": "assistant", "content": list(tokens)}

    def _recorded(
        self, call: Call, request: RolloutInferRequest, response: ChatCompletionResponse, turn: Turn
    ) -> Answer:
        choice = response.choices[0]
        text, stop = before_stop(choice.message.content or "", call.stop)
        answer = Answer(
            text=text,
            tool_calls=[asdict(tool) for tool in choice.message.tool_calls or []],
            finish_reason="tool_calls" if choice.message.tool_calls else choice.finish_reason or "stop",
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.completion_ids),
            stop=stop,
        )
        tokens, _ = self.scheduler.get_response_token_data(request, choice)
        for message in (answer.message, {"content": text}):  # a dialect without such a call sends the text
            self._tokens[key_of(message)] = tokens
        messages = [*request.messages, {"role": "assistant", "content": text}]
        self.turns.recorded.append(turn)
        self.outputs.append(RolloutOutput(response=replace(response, id=call.name), messages=messages))
        return answer

    def add_empty(self) -> None:
        """Add a turn without tokens: a rollout has a prompt."""
        encoded = self.scheduler.infer_engine.template.encode(replace(self.request), return_template_inputs=True)
        logprobs: list[float] | None = [] if self.sampling.logprobs else None
        self.turns.recorded.append(Turn(list(encoded["input_ids"]), [], logprobs))
        messages = [*self.request.messages, {"role": "assistant", "content": ""}]
        self.outputs.append(RolloutOutput(response=empty_response(self.request), messages=messages))


async def _infos_of(agent: Agent, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Run the agent, whose failure is that of its rollout alone, also if it ends its thread."""
    try:
        returned: object = await agent(row, base_url, api_key)
        if returned is None:
            return {}
        if isinstance(returned, bool) or not isinstance(returned, Real):  # also numpy's
            raise TypeError(f"it returned {returned!r:.100}, which is neither a number nor None")
        return {"total_reward": float(returned)}
    except BaseException as error:
        return {AGENT_ERROR: f"{type(error).__name__}: {error}"[:_SHOWN]}
