"""Reward functions, from ms-swift's registry or a user's plugin, called the way ms-swift calls them.

A function receives the completions, and as keyword arguments one list per column: the dataset's columns, the messages
with the completion as their last turn, response_token_ids, finish_reason, is_truncated, prompt_id and request_id. It
also receives trainer_state. It returns one number per completion, or None for a completion to which it does not apply.
"""

import asyncio
import inspect
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from typing import Any

from swift_megatron_grpo.grading.scores import ScoreRow
from swift_megatron_grpo.runtime.deadlines.interrupt import DeadlineExceeded
from swift_megatron_grpo.runtime.event_loops import run_to_end
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.types import Rollout

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
# A time limit on the function of this name: yields its seconds (None: no limit), raises DeadlineExceeded past them.
Limit = Callable[[str], AbstractContextManager[float | None]]
ScoreRows = list[ScoreRow]  # [completion][function]

_MEDIA = ("images", "videos", "audios")  # may be large: passed without a copy; all other columns are copied
_OPTIONAL = (*_MEDIA, "tools", "objects")  # ms-swift omits these where they are empty
_NOT_FOR_REWARDS = frozenset(  # columns that ms-swift does not pass to reward functions
    ("add_eos", "response_loss_mask", "rollout_logprobs", "routed_experts", "is_truncated", "rewards", "advantages")
    + ("teacher_prompt", "teacher_images", "teacher_messages")
)
_MOST_SHOWN = 2000  # characters of an error or a value; all ranks repeat them
_GENERATED = frozenset(  # arguments of reward functions beyond the columns
    ("messages", "prompt_id", "request_id", "finish_reason", "is_truncated", "rollout_infos", "response_token_ids")
    + ("trainer_state",)
)
_TIMED_OUT = object()


class RewardError(RuntimeError):
    """A reward function failed or returned no valid list. The message names the function and a completion."""


def no_limit(what: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    names: Sequence[str]
    functions: Sequence[RewardFunction]


def call_reward_functions(
    rollouts: Sequence[Rollout],
    rewards: RewardFunctions,
    trainer_state: Any,
    limit: Limit = no_limit,
    drop_failing: bool = False,
) -> ScoreRows:
    """Call every reward function on all completions and return the scores, [completion][function].

    NaN and infinity are passed through: `total_rewards` decides what happens to them. With `drop_failing` a function
    that raises gives NaN to all completions.
    """
    if not rollouts:
        return []
    by_function = _call_all(rewards, _Batch(rollouts, trainer_state), limit, drop_failing)
    return [[scores[i] for scores in by_function] for i in range(len(rollouts))]


def reward_columns(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return the keyword arguments of reward functions: one value per completion, None if its row has no value."""
    counts: Counter[str] = Counter()  # completions so far, by prompt
    rows = []
    for rollout in rollouts:
        prompt = rollout.prompt
        row = {name: value if name in _MEDIA else deepcopy(value) for name, value in prompt.row.items()}
        messages = row.pop("messages")
        if rollout.messages is not None:
            messages = deepcopy(rollout.messages)
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        generated = {
            "messages": [*messages, {"role": "assistant", "content": rollout.text}],
            "prompt_id": prompt.prompt_id,
            "request_id": f"{prompt.prompt_id}-{counts[prompt.prompt_id]}",
            "finish_reason": rollout.finish_reason,
            "is_truncated": rollout.truncated,
            "rollout_infos": deepcopy(rollout.infos),
            "response_token_ids": [
                token
                for sequence in rollout.sequences
                for token in compress(sequence.completion_ids, sequence.sampled_mask)
            ],
        }
        kept = (name for name in row if name not in _NOT_FOR_REWARDS and (row[name] or name not in _OPTIONAL))
        rows.append({**generated, **{name: row[name] for name in kept}})
        counts[prompt.prompt_id] += 1
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the row of every completion, from the keyword arguments of reward functions."""
    lists = {name: values for name, values in columns.items() if name != "trainer_state"}
    return [
        {name: values[place] for name, values in lists.items() if values[place] is not None} for place in range(count)
    ]


def columns_needed(function: type[Any]) -> list[str]:
    """Return the columns of the dataset without which the functions of this class cannot be called."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    after_completions = list(inspect.signature(function.__call__).parameters.values())[2:]
    needed = [each.name for each in after_completions if each.kind in named and each.default is each.empty]
    return [name for name in needed if name not in _GENERATED]


def gym_reward(completions: list[str], rollout_infos: list[dict[str, Any]], **columns: Any) -> list[float | None]:
    """Return the environment's total reward of each completion (--use_gym_env), None where it reported none."""
    return [infos.get("total_reward") for infos in rollout_infos]


def describe(rollout: Rollout) -> str:
    """Identify a completion in an error message."""
    if rollout.body is not None:
        return f"prompt {rollout.prompt.prompt_id}, a completion of {rollout.length} tokens"
    shown = rollout.text if len(rollout.text) <= 200 else rollout.text[:200] + " ..."
    return f"prompt {rollout.prompt.prompt_id}, completion {shown!r}"


class _Batch:
    """The completions on which every function is called, once."""

    def __init__(self, rollouts: Sequence[Rollout], trainer_state: Any) -> None:
        self._rollouts = rollouts
        self._columns = reward_columns(rollouts)
        self._trainer_state = trainer_state

    def call(self, function: RewardFunction) -> Any:
        """Call a function; a coroutine function returns its coroutine."""
        completions = [rollout.text for rollout in self._rollouts]
        columns = {name: list(values) for name, values in self._columns.items()}
        return function(completions, **{"trainer_state": self._trainer_state, **columns})

    def scores(self, name: str, result: Any) -> list[float | None]:
        """Return the scores in a function's result. Its values may be objects, with code that runs here."""
        try:
            iterator = iter(result)
            if isinstance(result, Mapping | Set | bytes):  # of keys, or in no order
                raise TypeError
        except TypeError:
            raise RewardError(
                f"reward function {name} returned {type(result).__name__}, not a list of {len(self._rollouts)} numbers"
            ) from None
        values, rollouts = list(iterator), self._rollouts
        if len(values) != len(rollouts):
            raise RewardError(f"reward function {name} returned {len(values)} rewards for {len(rollouts)} completions")
        return [_validated_score(name, value, rollout) for value, rollout in zip(values, rollouts, strict=True)]

    async def outcome(self, name: str, function: RewardFunction) -> Any:
        """Return the scores of a coroutine function, or what it raises: asyncio ends its loop at SystemExit."""
        try:
            with _forks_end_here(name):
                return self.scores(name, await self.call(function))
        except BaseException as error:
            return error

    def describe(self) -> str:
        """Identify the batch in an error message. Which completion is at fault only another call could show."""
        return f"on {len(self._rollouts)} completions, the first: {describe(self._rollouts[0])}"

    def scores_of_failed(self, name: str, error: BaseException, drop: bool) -> list[float | None]:
        """Return NaN for every completion, or raise RewardError. Another call may cost money or change a state."""
        if isinstance(error, RewardError):  # it returned no valid list, which --bad_reward does not excuse
            raise error
        fault = f"reward function {name} raised {type(error).__name__}: {_shown(error, str)}"
        if not drop:
            raise RewardError(f"{fault} ({self.describe()})") from error
        logger.warning(f"{fault}; --bad_reward drop leaves its batch out ({self.describe()})")
        return [math.nan for _ in self._rollouts]

    @contextmanager
    def limited(self, limit: Limit, names: Sequence[str]) -> Iterator[float | None]:
        """Limit the time of these functions together, and name them if they exceed it."""
        start = time.monotonic()
        try:
            with limit(f"reward function {' or '.join(names)}") as seconds:
                yield seconds
        except DeadlineExceeded:
            raise self.timeout_error(names, time.monotonic() - start) from None

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


def _call_all(rewards: RewardFunctions, batch: _Batch, limit: Limit, drop_failing: bool) -> ScoreRows:
    """Call the synchronous functions one after the other, then all coroutine functions; return [function][score]."""
    results: dict[int, list[float | None]] = {}
    later = {}  # names of coroutine functions
    for i, function in enumerate(rewards.functions):
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            later[i] = rewards.names[i]
    for i, (name, function) in enumerate(zip(rewards.names, rewards.functions, strict=True)):
        if i in later:
            continue
        try:
            with batch.limited(limit, [name]), _forks_end_here(name):
                results[i] = batch.scores(name, batch.call(function))
        except SharedFailure:  # from `limited`: the run stops
            raise
        except BaseException as error:  # also sys.exit and KeyboardInterrupt, which would end this rank unnamed
            results[i] = batch.scores_of_failed(name, error, drop_failing)
    if later:
        start = time.monotonic()
        with batch.limited(limit, list(later.values())) as seconds, asyncio.Runner() as runner:
            calls = [batch.outcome(name, rewards.functions[i]) for i, name in later.items()]
            outcomes = dict(zip(later, run_to_end(runner.get_loop(), _together(calls, seconds)), strict=True))
        if late := [name for i, name in later.items() if outcomes[i] is _TIMED_OUT]:
            raise batch.timeout_error(late, time.monotonic() - start)
        for i, name in later.items():
            failed = isinstance(outcomes[i], BaseException)
            results[i] = batch.scores_of_failed(name, outcomes[i], drop_failing) if failed else outcomes[i]
    return [results[i] for i in range(len(rewards.functions))]


async def _together(calls: Sequence[Coroutine[Any, Any, Any]], seconds: float | None) -> list[Any]:
    """Return the result of each coroutine, or _TIMED_OUT."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    # Slightly shorter than the limit around all of them, which cannot identify the function that is too slow.
    await asyncio.wait(tasks, timeout=None if seconds is None else 0.9 * seconds)
    return [task.result() if task.done() else _TIMED_OUT for task in tasks]


def _validated_score(name: str, value: Any, rollout: Rollout) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):  # float("1") would succeed
            return float(value)
    except OverflowError:  # 10**400
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    raise RewardError(
        f"reward function {name} returned {_shown(value, repr)} ({type(value).__name__}), neither a number nor None "
        f"({describe(rollout)})"
    )


def _shown(value: Any, text_of: Callable[[Any], str]) -> str:
    """Return the text of a user's value for an error: shortened, and without a failure of its own."""
    try:
        text = text_of(value)
    except BaseException as error:  # also sys.exit
        return f"a value without a text ({type(error).__name__})"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."
