"""Reward functions, from ms-swift's registry or a user's plugin, called the way ms-swift calls them.

A function receives the completions, and as keyword arguments one list per column: the dataset's columns, the messages
with the completion as their last turn, response_token_ids, finish_reason, is_truncated, prompt_id and request_id. It
also receives trainer_state. It returns one number per completion, or None for a completion to which it does not apply.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.types import Rollout

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
Scores = list[list[float | None]]  # [completion][function]
Columns = dict[str, list[Any]]

_MEDIA = ("images", "videos", "audios")  # may be large: passed without a copy; all other columns are copied
_OPTIONAL = (*_MEDIA, "tools", "objects")  # ms-swift omits these where they are empty
_NOT_FOR_REWARDS = frozenset(  # columns that ms-swift does not pass to reward functions
    ("add_eos", "response_loss_mask", "rollout_logprobs", "routed_experts", "is_truncated", "rewards", "advantages")
    + ("teacher_prompt", "teacher_images", "teacher_messages")
)
_TIMED_OUT = object()
_RETRY_SECONDS = 10.0  # for calls on parts of a batch on which a function raised (--bad_reward drop)


class RewardError(RuntimeError):
    """A reward function failed or returned no valid list. The message names the function and a completion."""


class Limit(Protocol):
    """A time limit on one reward function: yields its seconds (None: no limit), raises DeadlineExceeded past them."""

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
    rollouts: Sequence[Rollout],
    rewards: RewardFunctions,
    trainer_state: Any,
    limit: Limit = no_limit,
    drop_failing: bool = False,
) -> Scores:
    """Call every reward function on all completions and return the scores, [completion][function].

    NaN and infinity are passed through: `total_rewards` decides what happens to them. With `drop_failing` a completion
    on which a function raises gets NaN as well.
    """
    if not rollouts:
        return []
    batch = _Batch(rollouts, reward_columns(rollouts), trainer_state)
    results = _call_all(rewards, batch, limit, drop_failing)
    by_function = [_validated(name, result, rollouts) for name, result in zip(rewards.names, results, strict=True)]
    return [list(row) for row in zip(*by_function, strict=True)]


def reward_columns(rollouts: Sequence[Rollout]) -> Columns:
    """Return the keyword arguments of reward functions: one value per completion, None if its row has no value."""
    counts: Counter[str] = Counter()  # completions so far, by prompt
    rows = []
    for rollout in rollouts:
        prompt_id = rollout.prompt.prompt_id
        rows.append(_reward_row(rollout, request_id=f"{prompt_id}-{counts[prompt_id]}"))
        counts[prompt_id] += 1
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def gym_reward(completions: list[str], rollout_infos: list[dict[str, Any]], **columns: Any) -> list[float | None]:
    """Return the environment's total reward of each completion (--use_gym_env), None where it reported none."""
    return [infos.get("total_reward") for infos in rollout_infos]


def describe(rollout: Rollout) -> str:
    """Identify a completion in an error message."""
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

    def call(self, name: str, function: RewardFunction, rows: slice = slice(None)) -> Any:
        """Call a function on these completions, and wait for a coroutine function."""
        if _is_async(function):
            return asyncio.run(self.call_async(name, function, rows))
        with _forks_end_here(name):
            return self._call(function, rows)

    async def call_async(self, name: str, function: RewardFunction, rows: slice = slice(None)) -> Any:
        with _forks_end_here(name):
            return await self._call(function, rows)

    def _call(self, function: RewardFunction, rows: slice) -> Any:
        completions = [rollout.text for rollout in self.rollouts[rows]]
        columns = {name: values[rows] for name, values in self.columns.items()}
        return function(completions, **{"trainer_state": self.trainer_state, **columns})

    def describe(self) -> str:
        """Identify the batch in an error message. Which completion is at fault only another call could show."""
        return f"on {len(self.rollouts)} completions, the first: {describe(self.rollouts[0])}"

    def timeout_error(self, names: Sequence[str], seconds: float) -> RewardError:
        return RewardError(
            f"reward function {' or '.join(names)} has not returned after {seconds:.1f} s (--reward_timeout), "
            f"{self.describe()}"
        )


@contextmanager
def _forks_end_here(name: str) -> Iterator[None]:
    """End a child that reward function `name` has forked where it would leave the function.

    It would continue as a second copy of its rank. A child that calls sys.exit ends with its exit code, as it would in
    a script.
    """
    rank = os.getpid()
    try:
        yield
    except SystemExit as end:
        if os.getpid() != rank:
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    finally:
        if os.getpid() != rank:
            line = (
                f"swift_megatron_grpo: reward function {name} forked a process that left the function; it is ended, "
                "because it would continue as a second copy of this rank. End it with os._exit in the function\n"
            )
            os.write(2, line.encode())
            os._exit(1)


def _call_all(rewards: RewardFunctions, batch: _Batch, limit: Limit, drop_failing: bool) -> list[Any]:
    """Call the synchronous functions one after the other, and then all coroutine functions concurrently."""
    results: list[Any] = [None] * len(rewards.functions)

    def on_failure(i: int, error: BaseException, seconds: float) -> None:
        name = rewards.names[i]
        function = rewards.functions[i]
        if not drop_failing:
            raise RewardError(
                f"reward function {name} raised {type(error).__name__}: {error} ({batch.describe()})"
            ) from error
        with limit(f"reward function {name}"):
            results[i] = _scores_of_others(name, function, batch, error, max(_RETRY_SECONDS, 2 * seconds))

    for i, function in enumerate(rewards.functions):
        if not _is_async(function):
            start = time.monotonic()
            try:
                with limit(f"reward function {rewards.names[i]}"):
                    results[i] = batch.call(rewards.names[i], function)
            except DeadlineExceeded:
                raise batch.timeout_error([rewards.names[i]], time.monotonic() - start) from None
            except SharedFailure:  # from `limit`: the run stops
                raise
            except BaseException as error:  # also sys.exit and KeyboardInterrupt, which would end this rank unnamed
                on_failure(i, error, time.monotonic() - start)
    coroutines = [i for i, function in enumerate(rewards.functions) if _is_async(function)]
    if coroutines:
        start = time.monotonic()
        names = [rewards.names[i] for i in coroutines]
        try:
            with limit(f"reward function {' or '.join(names)}") as seconds:
                functions = [rewards.functions[i] for i in coroutines]
                outcomes = asyncio.run(_call_concurrently(names, functions, batch, seconds))
        except DeadlineExceeded:  # a coroutine blocked without awaiting
            raise batch.timeout_error(names, time.monotonic() - start) from None
        timed_out = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is _TIMED_OUT]
        if timed_out:
            raise batch.timeout_error(timed_out, time.monotonic() - start)
        for i, outcome in zip(coroutines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                on_failure(i, outcome, time.monotonic() - start)
            else:
                results[i] = outcome
    return results


async def _call_concurrently(
    names: Sequence[str], functions: Sequence[RewardFunction], batch: _Batch, seconds: float | None
) -> list[Any]:
    """Return for each function its result, the exception that it raised, or _TIMED_OUT."""
    # Slightly shorter than the limit around all of them, which cannot identify the function that is too slow.
    timeout = None if seconds is None else 0.9 * seconds
    calls = [
        _call_with_timeout(name, function, batch, timeout) for name, function in zip(names, functions, strict=True)
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


async def _call_with_timeout(name: str, function: RewardFunction, batch: _Batch, seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await batch.call_async(name, function)
    except TimeoutError:
        if limit.expired():
            return _TIMED_OUT
        raise
    except (SystemExit, KeyboardInterrupt) as error:  # raised out of the event loop, past asyncio.gather
        return error


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _scores_of_others(
    name: str, function: RewardFunction, batch: _Batch, error: BaseException, seconds: float
) -> list[float | None]:
    """Return the scores of the completions on which a function does not fail, and NaN for those on which it does.

    It is called again on smaller and smaller parts. Completions that it has not scored after `seconds` get NaN.
    """
    rollouts = batch.rollouts
    scores: list[float | None] = [math.nan] * len(rollouts)
    deadline = time.monotonic() + seconds

    def score(first: int, last: int) -> None:
        if time.monotonic() > deadline:
            return
        rows = slice(first, last)
        try:
            result = batch.call(name, function, rows)
        except (DeadlineExceeded, SharedFailure):
            raise
        except BaseException:
            if last - first > 1:
                middle = (first + last) // 2
                score(first, middle)
                score(middle, last)
            return
        scores[rows] = _validated(name, result, rollouts[rows])

    middle = len(rollouts) // 2
    for first, last in ((0, middle), (middle, len(rollouts))) if middle else ():
        score(first, last)
    failed = [i for i, value in enumerate(scores) if value is not None and math.isnan(value)]
    example = describe(rollouts[failed[0]]) if failed else "none of them alone"
    logger.warning(
        f"reward function {name} raised {type(error).__name__}: {error}; --bad_reward drop leaves {len(failed)} of "
        f"{len(rollouts)} completions out, the first: {example}"
    )
    return scores


def _validated(name: str, result: Any, rollouts: Sequence[Rollout]) -> list[float | None]:
    try:
        values = list(result)
    except TypeError:
        raise RewardError(
            f"reward function {name} returned {type(result).__name__}, not a list of {len(rollouts)} numbers"
        ) from None
    if len(values) != len(rollouts):
        raise RewardError(f"reward function {name} returned {len(values)} rewards for {len(rollouts)} completions")
    return [_validated_score(name, value, rollout) for value, rollout in zip(values, rollouts, strict=True)]


def _validated_score(name: str, value: Any, rollout: Rollout) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):  # float("1") would succeed
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise RewardError(
        f"reward function {name} returned {value!r} ({type(value).__name__}), neither a number nor None "
        f"({describe(rollout)})"
    )
