"""Reward functions, from ms-swift's registry or a user's plugin, called the way ms-swift calls them.

A function gets the completions, and by keyword one list per column: the dataset's columns, the messages with the
completion as their last turn, response_token_ids, finish_reason, is_truncated, prompt_id, request_id; also
trainer_state. It returns one number per completion, or None where it does not apply.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

from swift_megatron_grpo.deadlines.interrupt import TimeIsUp, interrupted_after
from swift_megatron_grpo.types import Rollout

RewardFunction = Callable[..., Any]
Scores = list[list[float | None]]  # [completion][function]
Columns = dict[str, list[Any]]

_MEDIA = ("images", "videos", "audios")  # may be large: handed over as they are, everything else as a copy
_OPTIONAL = (*_MEDIA, "tools", "objects")  # ms-swift leaves these out where they are empty
_NOT_FOR_REWARDS = frozenset(  # columns that ms-swift keeps to itself
    ("add_eos", "response_loss_mask", "rollout_logprobs", "routed_experts", "is_truncated", "rewards", "advantages")
    + ("teacher_prompt", "teacher_images", "teacher_messages")
)
_LATE = object()
_SEARCH_SECONDS = 10.0  # a function that failed is asked again, to find the completion it fails on, for no longer


class RewardError(RuntimeError):
    """A reward function broke its contract. The message names the function and the completion."""


class Limit(Protocol):
    """Around one reward function. Yields its seconds, None for no limit; raises TimeIsUp when they are over."""

    def __call__(self, what: str) -> AbstractContextManager[float | None]: ...


def no_limit(what: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    names: Sequence[str]
    functions: Sequence[RewardFunction]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.functions) == len(self.weights):
            raise ValueError(
                f"{len(self.functions)} reward functions with {len(self.names)} names and {len(self.weights)} weights"
            )


def call_reward_functions(
    rollouts: Sequence[Rollout], rewards: RewardFunctions, trainer_state: Any, limit: Limit = no_limit
) -> Scores:
    """What every function says of every completion. NaN and infinity are passed on: `finish` decides what they mean."""
    if not rollouts:
        return []
    batch = _Batch(rollouts, reward_columns(rollouts), trainer_state)
    answers = _ask_all(rewards, batch, limit)
    by_function = [_numbers(name, answer, rollouts) for name, answer in zip(rewards.names, answers, strict=True)]
    return [list(row) for row in zip(*by_function, strict=True)]


def reward_columns(rollouts: Sequence[Rollout]) -> Columns:
    """The keyword arguments of reward functions: one value per completion, None where a row lacks the column."""
    drawn: Counter[str] = Counter()
    rows = []
    for rollout in rollouts:
        prompt_id = rollout.prompt.prompt_id
        rows.append(_reward_row(rollout, request_id=f"{prompt_id}-{drawn[prompt_id]}"))
        drawn[prompt_id] += 1
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def gym_reward(completions: list[str], rollout_infos: list[dict[str, Any]], **columns: Any) -> list[float | None]:
    """With --use_gym_env: what the environment gave. None where it has ended without a word of it."""
    return [infos.get("total_reward") for infos in rollout_infos]


def describe(rollout: Rollout) -> str:
    """Which completion, for an error message."""
    shown = rollout.text if len(rollout.text) <= 200 else rollout.text[:200] + " ..."
    return f"prompt {rollout.prompt.prompt_id}, completion {shown!r}"


def _reward_row(rollout: Rollout, request_id: str) -> dict[str, Any]:
    row = {name: value if name in _MEDIA else deepcopy(value) for name, value in rollout.prompt.row.items()}
    messages = row.pop("messages")
    if rollout.messages is not None:
        messages = deepcopy(rollout.messages)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    dataset = {
        name: value for name, value in row.items() if name not in _NOT_FOR_REWARDS and (value or name not in _OPTIONAL)
    }
    return {
        "messages": [*messages, {"role": "assistant", "content": rollout.text}],
        "prompt_id": rollout.prompt.prompt_id,
        "request_id": request_id,
        "finish_reason": rollout.finish_reason,
        "is_truncated": rollout.truncated,
        "rollout_infos": deepcopy(rollout.infos),
        "response_token_ids": list(compress(rollout.completion_ids, rollout.sampled_mask)),
        **dataset,
    }


@dataclass(frozen=True, slots=True)
class _Batch:
    rollouts: Sequence[Rollout]
    columns: Columns
    trainer_state: Any

    def ask(self, function: RewardFunction, rows: slice = slice(None)) -> Any:
        completions = [rollout.text for rollout in self.rollouts[rows]]
        columns = {name: values[rows] for name, values in self.columns.items()}
        return function(completions, **{"trainer_state": self.trainer_state, **columns})


def _ask_all(rewards: RewardFunctions, batch: _Batch, limit: Limit) -> list[Any]:
    """The functions one after the other; those that are coroutines at the end and together."""
    answers: list[Any] = [None] * len(rewards.functions)
    for i, function in enumerate(rewards.functions):
        if not _is_async(function):
            start = time.monotonic()
            try:
                with limit(f"reward function {rewards.names[i]}"):
                    answers[i] = batch.ask(function)
            except TimeIsUp:
                raise _too_slow([rewards.names[i]], batch, time.monotonic() - start) from None
            except Exception as error:
                raise _failure(rewards.names[i], function, batch, error, time.monotonic() - start) from error
    together = [i for i, function in enumerate(rewards.functions) if _is_async(function)]
    if together:
        start = time.monotonic()
        names = [rewards.names[i] for i in together]
        try:
            with limit(f"reward function {' or '.join(names)}") as seconds:
                results = asyncio.run(_ask_together([rewards.functions[i] for i in together], batch, seconds))
        except TimeIsUp:  # in code that does not await
            raise _too_slow(names, batch, time.monotonic() - start) from None
        late = [name for name, result in zip(names, results, strict=True) if result is _LATE]
        if late:
            raise _too_slow(late, batch, time.monotonic() - start)
        for i, result in zip(together, results, strict=True):
            if isinstance(result, BaseException):
                raise _failure(
                    rewards.names[i], rewards.functions[i], batch, result, time.monotonic() - start
                ) from result
            answers[i] = result
    return answers


async def _ask_together(functions: Sequence[RewardFunction], batch: _Batch, seconds: float | None) -> list[Any]:
    """Of each its answer, the exception that it raised, or _LATE."""
    # A moment before the limit around all of them, which could not tell which one it is.
    early = None if seconds is None else 0.9 * seconds
    answers = [_ask_in_time(function, batch, early) for function in functions]
    return await asyncio.gather(*answers, return_exceptions=True)


async def _ask_in_time(function: RewardFunction, batch: _Batch, seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _ask_async(function, batch, slice(None))
    except TimeoutError:
        if limit.expired():
            return _LATE
        raise


async def _ask_async(function: RewardFunction, batch: _Batch, rows: slice) -> Any:
    return await batch.ask(function, rows)


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _failure(name: str, function: RewardFunction, batch: _Batch, error: BaseException, seconds: float) -> RewardError:
    said = f"reward function {name} raised {type(error).__name__}: {error}"
    row = _failing_row(function, batch) if seconds < _SEARCH_SECONDS else None
    if row is None:
        return RewardError(f"{said} (on {len(batch.rollouts)} completions, the first: {describe(batch.rollouts[0])})")
    return RewardError(f"{said} ({describe(batch.rollouts[row])})")


def _too_slow(names: Sequence[str], batch: _Batch, seconds: float) -> RewardError:
    return RewardError(
        f"reward function {' or '.join(names)} has not answered for {seconds:.1f} s (--reward_timeout), on "
        f"{len(batch.rollouts)} completions, the first: {describe(batch.rollouts[0])}"
    )


def _failing_row(function: RewardFunction, batch: _Batch) -> int | None:
    """A completion that the function fails on when it is alone, found by halves; None if only several together fail."""
    try:
        with interrupted_after(2 * _SEARCH_SECONDS):
            return _search_row(function, batch)
    except TimeIsUp:
        return None


def _search_row(function: RewardFunction, batch: _Batch) -> int | None:
    first, last = 0, len(batch.rollouts)
    deadline = time.monotonic() + _SEARCH_SECONDS
    while last - first > 1:
        middle = (first + last) // 2
        if time.monotonic() > deadline:
            return None
        if _fails(function, batch, slice(first, middle)):
            last = middle
        elif _fails(function, batch, slice(middle, last)):
            first = middle
        else:
            return None
    return first


def _fails(function: RewardFunction, batch: _Batch, rows: slice) -> bool:
    try:
        if _is_async(function):
            asyncio.run(_ask_async(function, batch, rows))
        else:
            batch.ask(function, rows)
    except Exception:
        return True
    return False


def _numbers(name: str, answer: Any, rollouts: Sequence[Rollout]) -> list[float | None]:
    try:
        values = list(answer)
    except TypeError:
        raise RewardError(
            f"reward function {name} returned {type(answer).__name__}, not a list of {len(rollouts)} numbers"
        ) from None
    if len(values) != len(rollouts):
        raise RewardError(f"reward function {name} returned {len(values)} rewards for {len(rollouts)} completions")
    return [_number(name, value, rollout) for value, rollout in zip(values, rollouts, strict=True)]


def _number(name: str, value: Any, rollout: Rollout) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):  # float("1") would be one
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise RewardError(
        f"reward function {name} returned {value!r} ({type(value).__name__}), neither a number nor None "
        f"({describe(rollout)})"
    )
