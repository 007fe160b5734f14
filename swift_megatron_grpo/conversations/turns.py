"""Several turns of one conversation as one sequence of tokens: what the engine saw and sampled, never encoded again.

Each turn's prompt holds the conversation so far. So the last prompt and what followed it is the whole, and a token of
an earlier turn is where it was sampled if the prompt before it is still the beginning of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None  # of completion_ids


@dataclass(frozen=True, slots=True)
class Message:
    """What a scheduler says of one message of the assistant, which may be the work of several turns."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Conversation:
    prompt_ids: list[int]  # before the first sampled token that is trained
    completion_ids: list[int]  # [c] all after it
    sampled: list[bool]  # [c] by the policy; the others are a tool's or the environment's
    logprobs: list[float] | None  # of the sampled ones
    lost_turns: int  # whose words the scheduler has rewritten or taken out: the policy never saw what is there now


def turn_seed(seed: int | None, number: int) -> int | None:
    """Of the conversation's turn of this number, from 1. Not the conversation's own and not one beside it: neighbouring
    conversations have neighbouring seeds."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(f"{seed}, {number}".encode(), digest_size=6).digest(), "big")


def join(turns: Sequence[Turn], messages: Sequence[Message] = ()) -> Conversation:
    """`messages`: from which a scheduler takes tokens out of the loss that the policy did sample."""
    tokens = turns[-1].prompt_ids + turns[-1].completion_ids
    found: dict[int, float | None] = {}  # position of each sampled token, and its log-prob
    lost = 0
    for turn in turns:
        start = len(turn.prompt_ids)
        kept = _common(tokens[start:], turn.completion_ids) if tokens[:start] == turn.prompt_ids else 0
        lost += kept == 0 and bool(turn.completion_ids)
        logprobs: Sequence[float | None] = turn.logprobs or [None] * kept
        found |= {start + i: logprobs[i] for i in range(kept)}
    for position in _left_out(tokens, turns, messages):
        found.pop(position, None)
    begin = min(found, default=len(turns[-1].prompt_ids))
    values = [found[position] for position in sorted(found)]
    known = [value for value in values if value is not None]
    return Conversation(
        prompt_ids=tokens[:begin],
        completion_ids=tokens[begin:],
        sampled=[position in found for position in range(begin, len(tokens))],
        logprobs=known if len(known) == len(values) else None,
        lost_turns=lost,
    )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _left_out(tokens: Sequence[int], turns: Sequence[Turn], messages: Sequence[Message]) -> list[int]:
    """Positions that a scheduler's loss mask takes out."""
    positions: list[int] = []
    cursor = 0
    for message in messages:
        start = _place(tokens, turns, message.ids, cursor)
        if start is None:  # rewritten since, so none of its tokens counts as sampled
            continue
        positions += [start + i for i, trained in enumerate(message.trained) if not trained]
        cursor = start + len(message.ids)
    return positions


def _place(tokens: Sequence[int], turns: Sequence[Turn], ids: Sequence[int], cursor: int) -> int | None:
    """Where a message begins: where a turn's completion does, or before it by a prefix that the template gives."""
    for turn in turns:
        begin = len(turn.prompt_ids)
        for start in range(begin, max(cursor, begin - len(ids)) - 1, -1):
            if list(tokens[start : start + len(ids)]) == list(ids):
                return start
    return None
