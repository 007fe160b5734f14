"""Reward models behind servers: classifiers (vLLM's /classify and /pooling) and judges (/v1/chat/completions).

A completion is one request. A server may be slow, restart, be down, or answer without a score. A failure that may pass
is repeated within a time limit; any other one ends the run or costs this completion, as --bad_reward says.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp

from swift_megatron_grpo.grading.rewards import rows_of
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.http import (
    InvalidResponse,
    ServerFailure,
    limited_object,
    open_session,
    repeated,
    served_model,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
AT_ONCE = 64  # requests in flight, from each rank
_MOST_BYTES = 2**22  # of a response
_SHOWN = 200  # characters of a completion or an answer in an error
_TRIED = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}


class RewardServerFailure(SharedFailure):
    """The server of a reward model is lost, or answers without a score."""


class Judge(Protocol):
    """The plugin of a judge (--reward_model_plugin)."""

    def request(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the body of a request, with `messages`; None: the judge does not apply to this completion.

        row: the columns of the dataset, and `messages` with the completion as the last one.
        """

    def score(self, text: str) -> float | None:
        """Return the score that the judge's answer states; None: it states none."""


@dataclass(frozen=True, slots=True)
class RewardServer:
    """Called like a reward function. Every call has an event loop of its own."""

    address: str  # with its route
    route: str
    judge: Judge | None  # None: a classifier
    timeout: float  # seconds for one completion, with all tries
    drops: bool  # a completion without a score is left out; otherwise the run ends
    api_key: str | None = None

    def check(self) -> None:
        """Raise RewardServerFailure unless the server has a model, and a classifier scores a conversation."""

        async def ask() -> None:
            async with open_session({}, self.api_key) as session:
                model = await self._model(session)
                if self.judge is None:
                    body = {"model": model, **(self._request(_TRIED) or {})}
                    await self._tried(lambda limit: self._score(session, body, limit))

        try:
            asyncio.run(ask())
        except ServerFailure as problem:
            raise RewardServerFailure(self._message(problem)) from problem

    async def __call__(self, completions: Sequence[str], **columns: Any) -> list[float | None]:
        rows, free = rows_of(columns, len(completions)), asyncio.Semaphore(AT_ONCE)
        problems: dict[int, str] = {}

        async def score_one(session: aiohttp.ClientSession, model: str, place: int) -> float | None:
            try:
                body = self._request(rows[place])
                if body is None:
                    return None
                async with free:
                    return await self._tried(lambda limit: self._score(session, {"model": model, **body}, limit))
            except ServerFailure as problem:
                text = completions[place]
                problems[place] = f"{self._message(problem)}, for the completion {text[:_SHOWN]!r}"
                if not self.drops:
                    raise RewardServerFailure(problems[place]) from problem
                return math.nan

        try:
            async with open_session({}, self.api_key) as session:
                model = await self._model(session)
                async with asyncio.TaskGroup() as group:  # the first failure ends all
                    tasks = [group.create_task(score_one(session, model, place)) for place in range(len(rows))]
        except ServerFailure as problem:
            raise RewardServerFailure(self._message(problem)) from problem
        except ExceptionGroup as failures:  # of the group: those of several completions are alike
            raise failures.exceptions[0] from failures
        if problems:
            count, first = f"{len(problems)} of {len(rows)} completions", next(iter(problems.values()))
            logger.warning(f"{first}; --bad_reward drop leaves {count} out")
        return [task.result() for task in tasks]

    async def _model(self, session: aiohttp.ClientSession) -> str:
        base = self.address.removesuffix(self.route)
        return str((await self._tried(lambda limit: served_model(session, base, limit)))["id"])

    async def _tried(self, ask: Callable[[float], Awaitable[T]]) -> T:
        return await repeated(ask, self.timeout, "--reward_model_timeout")

    def _request(self, row: dict[str, Any]) -> dict[str, Any] | None:
        if self.judge is not None:
            return self.judge.request(row)
        return {"messages": row["messages"], "use_activation": False}  # the number of the head itself

    async def _score(self, session: aiohttp.ClientSession, body: dict[str, Any], timeout: float) -> float:
        answer = await limited_object(session, "POST", self.address, timeout, _MOST_BYTES, {"json": body})
        return _number_of(answer) if self.judge is None else _score_of(self.judge, answer)

    def _message(self, problem: ServerFailure) -> str:
        return f"--reward_model {self.address}: {problem}"


def _number_of(answer: Mapping[str, Any]) -> float:
    """Return the one number of a classifier's answer: `probs` of /classify, `data` of /pooling."""
    try:
        [entry] = answer["data"]
        values = entry["probs"] if "probs" in entry else entry["data"]
        if len(values) == 1 and isinstance(values[0], list):
            [values] = values
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidResponse(f"its answer is not that of one text: {type(error).__name__}: {error}") from error
    if not isinstance(values, list) or len(values) != 1:
        count = len(values) if isinstance(values, list) else "no"
        raise InvalidResponse(f"it returns {count} numbers for a completion, and a reward model returns one")
    return _finite(values[0], "its answer")


def _score_of(judge: Judge, answer: Mapping[str, Any]) -> float:
    """Return the score that the plugin reads from the text of a judge's answer."""
    try:
        [choice] = answer["choices"]
        text = choice["message"]["content"]
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidResponse(f"its answer has not one choice: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise InvalidResponse(f"its answer is {text!r:.50}, not a text")
    source = f"`score` of the plugin {type(judge).__name__}"
    try:
        score = judge.score(text)
    except Exception as error:
        raise InvalidResponse(f"{source} raises {type(error).__name__}: {error} for {text[:_SHOWN]!r}") from error
    return _finite(score, f"{source}, for {text[:_SHOWN]!r},")


def _finite(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidResponse(f"{source} is {value!r:.50}, not a number")
    try:
        number = float(value)
    except OverflowError:  # 10**400
        number = math.inf
    if not math.isfinite(number):
        raise InvalidResponse(f"{source} is {number}")
    return number
