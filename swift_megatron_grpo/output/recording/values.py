"""Checks of the values of a recorded completion: types, lengths, the vocabulary, finite log-probs.

They find what a checksum cannot: a dump that was edited, or that was written with another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class BadRow(ValueError):
    """A line is damaged or belongs to another run. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the values of a completion must fit, from the model and the flags of this run."""

    vocabulary: int  # rows of the model's embedding
    reward_functions: int


def check_values(row: Mapping[str, Any], limits: Limits) -> None:
    """Raise BadRow for the first value that no run could have written. KeyError: a field is missing."""
    for field in ("prompt_ids", "completion_ids"):
        _check_tokens(field, row[field], limits.vocabulary)
    sampled = _check_sampled(row["sampled"], len(row["completion_ids"]))
    _check_logprobs(row["logprobs"], sampled)
    _check_rewards(row["rewards"], limits.reward_functions)
    for field, kinds in (("prompt_id", str), ("text", str), ("finish_reason", str), ("infos", dict)):
        _require(isinstance(row[field], kinds), field, row[field], f"not a {kinds.__name__}")
    _check_messages("messages", row["messages"])
    if row["conversation"] is not None:
        _check_messages("conversation", row["conversation"])
    version = row["weights_version"]
    _require(type(version) is int and version >= 0, "weights_version", version, "not the number of a step")


def _check_tokens(field: str, tokens: Any, vocabulary: int) -> None:
    _require(isinstance(tokens, list), field, tokens, "not a list of tokens")
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadRow(
                f"{field}[{index}] is {token!r}, but the model has the tokens 0 to {vocabulary - 1}; use the --model "
                "of the dumped run"
            )


def _check_sampled(sampled: Any, tokens: int) -> int:
    """Return the number of tokens that the policy sampled."""
    if sampled is None:
        return tokens
    _require(isinstance(sampled, list) and all(type(flag) is bool for flag in sampled), "sampled", sampled, "not flags")
    if len(sampled) != tokens:
        raise BadRow(f"sampled has {len(sampled)} values for {tokens} tokens of completion_ids")
    return sum(sampled)


def _check_logprobs(logprobs: Any, sampled: int) -> None:
    if logprobs is None:
        return
    _require(isinstance(logprobs, list), "logprobs", logprobs, "not a list of numbers")
    if len(logprobs) != sampled:
        raise BadRow(f"logprobs has {len(logprobs)} values for {sampled} sampled tokens")
    for index, value in enumerate(logprobs):
        _require(_is_number(value) and math.isfinite(value), f"logprobs[{index}]", value, "not a finite number")


def _check_rewards(rewards: Any, functions: int) -> None:
    _require(isinstance(rewards, list), "rewards", rewards, "not a list of numbers")
    if len(rewards) != functions:
        raise BadRow(f"rewards has {len(rewards)} values for {functions} reward functions")
    for index, value in enumerate(rewards):
        _require(value is None or _is_number(value), f"rewards[{index}]", value, "neither a number nor null")


def _check_messages(field: str, messages: Any) -> None:
    fits = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    _require(bool(fits), field, messages, "not a list of messages")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _require(fits: bool, field: str, value: Any, fault: str) -> None:
    if not fits:
        shown = repr(value)
        raise BadRow(f"{field} is {shown if len(shown) <= 60 else shown[:60] + ' ...'}, which is {fault}")
