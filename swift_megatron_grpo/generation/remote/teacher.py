"""A teacher behind a server: any vLLM with OpenAI's routes scores token ids (`prompt_logprobs`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.http import (
    InvalidResponse,
    ServerFailure,
    limited_object,
    open_session,
    repeated,
    served_model,
)

T = TypeVar("T")
_AT_ONCE = 64  # requests in flight
_BYTES_PER_TOKEN = 2000  # of a response, at most: an entry takes some 100
_SCATTER = 0.02  # nats: mean difference of two scores of one text
_HIGHEST = 1e-3  # a log-prob is at most 0, up to rounding


class TeacherFailure(SharedFailure):
    """The teacher's server is lost, or responds with what cannot be log-probs of the policy's tokens."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The teacher's log-probs of all tokens but the first, and the tokens as its tokenizer writes them."""

    logprobs: list[float]
    texts: list[str | None]


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """Scores token ids at temperature 1. Every call has an event loop of its own."""

    url: str
    timeout: float  # seconds for one text, with all tries
    api_key: str | None = None

    def check(self, tokens: Sequence[int], decode: Callable[[int], str], needed_length: int) -> None:
        """Raise TeacherFailure unless the server scores a text twice alike, with the policy's tokens and lengths."""
        longest = asyncio.run(self._with_client(lambda client: self._tried(client.longest)))
        if longest is not None and longest < needed_length:
            raise self._failure(
                f"its --max-model-len is {longest}, and prompt, completion and one more token take {needed_length}"
            )
        first, second = self.score([tokens, tokens])
        difference = sum(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True)) / len(first.logprobs)
        if difference > _SCATTER:
            raise self._failure(
                f"it scores one text twice with a mean difference of {difference:.3f} nats, above {_SCATTER}: its "
                "replicas are not the same model"
            )
        for token, text in zip(tokens[1:], first.texts, strict=True):
            own = decode(token)
            if text is not None and "\ufffd" not in own + text and own.strip() != text.strip():
                raise self._failure(f"its token {token} is {text!r:.50}, and the policy's {own!r:.50}")

    def score(self, texts: Sequence[Sequence[int]]) -> list[Scored]:
        return score_together([(self, tokens) for tokens in texts])

    async def scored(self, texts: Sequence[Sequence[int]]) -> list[Scored]:
        """Score texts together. A lost connection or a busy server costs a new try, and no text."""

        async def score_all(client: _TeacherClient) -> list[Scored]:
            model, free = await self._tried(client.model), asyncio.Semaphore(_AT_ONCE)

            async def score_one(tokens: Sequence[int]) -> Scored:
                async with free:
                    return await self._tried(lambda limit: client.score(model, tokens, limit))

            async with asyncio.TaskGroup() as group:  # the first failure ends all
                tasks = [group.create_task(score_one(tokens)) for tokens in texts]
            return [task.result() for task in tasks]

        return await self._with_client(score_all)

    async def _with_client(self, ask: Callable[[_TeacherClient], Awaitable[T]]) -> T:
        async with open_session({}, self.api_key) as session:
            return await ask(_TeacherClient(self.url, session))

    async def _tried(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Repeat a request that may succeed later, until the time limit."""
        try:
            return await repeated(ask, self.timeout, "--teacher_timeout")
        except ServerFailure as problem:
            raise self._failure(str(problem)) from problem

    def _failure(self, problem: str) -> TeacherFailure:
        return TeacherFailure(
            f"--teacher_model_server {self.url}: {problem}; use a vLLM server of the teacher, started with "
            "`vllm serve`, with the tokenizer of --model"
        )


def score_together(texts: Sequence[tuple[TeacherServer, Sequence[int]]]) -> list[Scored]:
    """Score each text by its server; all servers work at one time. Return the scores in the order of the texts."""
    places: dict[TeacherServer, list[int]] = {}
    for place, (server, _) in enumerate(texts):
        places.setdefault(server, []).append(place)

    async def score_all() -> dict[int, Scored]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                server: group.create_task(server.scored([texts[place][1] for place in of_server]))
                for server, of_server in places.items()
            }
        return {
            place: one
            for server, of_server in places.items()
            for place, one in zip(of_server, tasks[server].result(), strict=True)
        }

    try:
        scored = asyncio.run(score_all())
    except ExceptionGroup as failures:
        raise _first(failures) from failures
    return [scored[place] for place in range(len(texts))]


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the first failure: those of several texts are alike."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


@dataclass(frozen=True, slots=True)
class _TeacherClient:
    """The routes of OpenAI that a teacher needs, as vLLM has them."""

    url: str
    session: aiohttp.ClientSession

    async def model(self, timeout: float) -> str:
        return str((await served_model(self.session, self.url, timeout))["id"])

    async def longest(self, timeout: float) -> int | None:
        """Return the tokens of the longest sequence; None: it does not say."""
        longest = (await served_model(self.session, self.url, timeout)).get("max_model_len")
        return longest if isinstance(longest, int) else None

    async def score(self, model: str, tokens: Sequence[int], timeout: float) -> Scored:
        request = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        most = 2**16 + _BYTES_PER_TOKEN * len(tokens)
        address, content = self.url + "/v1/completions", {"json": request}
        body = await limited_object(self.session, "POST", address, timeout, most, content)
        try:
            entries = body["choices"][0]["prompt_logprobs"]
            if not isinstance(entries, list) or len(entries) != len(tokens):
                count = len(entries) if isinstance(entries, list) else type(entries).__name__
                raise ValueError(f"{count} entries for {len(tokens)} tokens")
            found = [entry[str(token)] for token, entry in zip(tokens[1:], entries[1:], strict=True)]
            logprobs = [_checked(entry["logprob"]) for entry in found]
            texts = [entry.get("decoded_token") for entry in found]
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidResponse(f"its prompt_logprobs cannot be read: {reason[:300]}") from error
        return Scored(logprobs, [text if isinstance(text, str) else None for text in texts])


def _checked(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a log-prob of {value!r:.50}")
    if not math.isfinite(value) or value > _HIGHEST:
        raise ValueError(f"a log-prob of {value}")
    return float(value)
