"""The turns of one conversation as one token sequence, exactly as the engine saw and sampled it: never re-encoded.

Each turn's prompt contains the conversation so far. So the last prompt plus the last completion is the whole sequence,
and a token of an earlier turn is at the position where it was sampled if that turn's prompt is still a prefix of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, takewhile
from operator import eq

from swift_megatron_grpo.types import ExpertRows, Span


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None  # of completion_ids
    routed_experts: ExpertRows | None = None  # of the prompt and all but the last sampled token, if they are reported
    spans: list[Span] | None = None  # of completion_ids; None: one version of the weights generates all requests

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class Message:
    """One assistant message as a scheduler reports it; several turns may have contributed to it."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation as one sample."""

    prompt_ids: list[int]  # before the first sampled token that is trained
    completion_ids: list[int]  # [c] everything after it
    sampled: list[bool]  # [c] True: sampled by the policy; False: from a tool or the environment
    logprobs: list[float] | None  # of the sampled tokens; None: a turn came without, also if none of it is left
    lost_turns: int  # turns that the scheduler has rewritten or removed: the policy never saw the new text
    routed_experts: ExpertRows | None = None  # of all tokens but the last: the prompt of the last turn has the others
    spans: list[Span] | None = None  # of the sampled tokens


def turn_seed(seed: int | None, number: int) -> int | None:
    """Derive the seed of turn `number`, from 1, by a hash: neighbouring conversations have consecutive seeds."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(f"{seed}, {number}".encode(), digest_size=6).digest(), "big")


def tokens_left(limit: int | None, turns: Sequence[Turn]) -> int | None:
    """Return the tokens that may still be sampled if all turns together may have `limit`; None: there is no limit."""
    return None if limit is None else max(0, limit - sum(len(turn.completion_ids) for turn in turns))


def sampled_any(tokens: frozenset[int], turns: Sequence[Turn]) -> bool:
    """Return True if the policy sampled any of these tokens in the last turn."""
    return bool(turns) and not tokens.isdisjoint(turns[-1].completion_ids)


def join(turns: Sequence[Turn], messages: Sequence[Message] = ()) -> Conversation:
    """Join turns into one sequence. `messages`: loss masks, which may exclude tokens that the policy sampled."""
    tokens = turns[-1].prompt_ids + turns[-1].completion_ids
    are_requested = any(turn.logprobs is not None for turn in turns)
    has_logprobs = are_requested and all(len(turn.logprobs or ()) == len(turn.completion_ids) for turn in turns)
    sampled, logprobs = set[int](), dict[int, float]()  # positions of sampled tokens, and their log-probs
    versions = dict[int, int]()  # of the weights, by position
    lost = 0
    for turn in turns:
        start = len(turn.prompt_ids)
        kept = 0
        if tokens[:start] == turn.prompt_ids:  # the length of what is left of its completion
            kept = sum(takewhile(bool, map(eq, tokens[start:], turn.completion_ids)))
        lost += kept == 0 and bool(turn.completion_ids)
        positions = range(start, start + kept)
        sampled.update(positions)
        logprobs.update(zip(positions, turn.logprobs or (), strict=False))
        of_tokens = (version for version, count in turn.spans or () for _ in range(count))
        versions.update(zip(positions, of_tokens, strict=False))
    sampled.difference_update(_masked_positions(tokens, turns, messages))
    begin = min(sampled, default=len(turns[-1].prompt_ids))
    return Conversation(
        prompt_ids=tokens[:begin],
        completion_ids=tokens[begin:],
        sampled=[position in sampled for position in range(begin, len(tokens))],
        logprobs=[logprobs[position] for position in sorted(sampled)] if has_logprobs else None,
        lost_turns=lost,
        routed_experts=turns[-1].routed_experts,
        spans=[
            (version, len(list(same))) for version, same in groupby(versions[position] for position in sorted(sampled))
        ]
        if versions
        else None,
    )


def branches(turns: Sequence[Turn], messages: Sequence[Message] = ()) -> list[Conversation]:
    """Return turns as sequences in which every sampled token stands once, in the context that it was sampled in.

    A turn whose prompt begins with all tokens of a sequence continues it, the longest one if there are several. Any
    other turn begins a sequence. The last turn belongs to the last sequence.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        begun = [chain for chain in chains if turn.prompt_ids[: chain[-1].length] == chain[-1].tokens]
        if begun:
            chains.remove(chain := max(begun, key=lambda chain: chain[-1].length))
            chains.append([*chain, turn])
        else:
            chains.append([turn])
    return [join(chain, messages) for chain in chains]


def _masked_positions(tokens: Sequence[int], turns: Sequence[Turn], messages: Sequence[Message]) -> list[int]:
    """Return the positions that a scheduler's loss mask excludes."""
    positions: list[int] = []
    cursor = 0
    for message in messages:
        start = _find_message(tokens, turns, message.ids, cursor)
        if start is None:  # rewritten since, so none of its tokens counts as sampled
            continue
        positions += [start + i for i, trained in enumerate(message.trained) if not trained]
        cursor = start + len(message.ids)
    return positions


def _find_message(tokens: Sequence[int], turns: Sequence[Turn], ids: Sequence[int], cursor: int) -> int | None:
    """Return the start of a message: at the start of a turn's completion, or earlier by a prefix of the template."""
    for turn in turns:
        begin = len(turn.prompt_ids)
        for start in range(begin, max(cursor, begin - len(ids)) - 1, -1):
            if list(tokens[start : start + len(ids)]) == list(ids):
                return start
    return None
