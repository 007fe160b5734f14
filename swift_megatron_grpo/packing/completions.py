"""The completions of a step as arrays, from which they are graded, counted and planned.

Where completions stay on their ranks, a rank knows those of all ranks, and needs the objects of a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from swift_megatron_grpo.packing.arrays import Columns, Outlined
from swift_megatron_grpo.packing.bins import Bools, Ints, Objects
from swift_megatron_grpo.types import Body, Rollout, Span

Rare = tuple[str, dict[str, Any], list[Span] | None]  # finish reason, infos, spans
REASONS = ("stop", "length")  # by `truncated`


@dataclass(frozen=True, slots=True)
class Facts(Columns):
    """The values of completions that all ranks know while one has the tokens, each [n]; five are those of Body."""

    prompt: Ints
    completion: Ints
    sampled: Ints
    first: Ints
    home: Ints
    version: Ints  # of the weights; with several, the oldest
    has_logprobs: Bools
    truncated: Bools
    asked: Objects  # its Prompt
    rare: Objects  # its Rare; None: REASONS has its finish reason, and there is nothing else

    def rollout(self, place: int) -> Rollout:
        """Return one completion, without its tokens."""
        asked = self.asked[place]
        body = Body(
            int(self.prompt[place]), int(self.completion[place]), int(self.sampled[place]), int(self.first[place]),
            int(self.home[place]), asked.prompt_id,
        )  # fmt: skip
        reason, infos, spans = self.rare[place] or (REASONS[int(self.truncated[place])], {}, None)
        return Rollout(
            asked, [], [], [] if self.has_logprobs[place] else None, "", reason, int(self.version[place]), infos=infos,
            spans=spans, body=body,
        )  # fmt: skip


class OutlinedRollouts(Outlined[Rollout]):
    """Completions without tokens of their own."""

    def __init__(self, facts: Facts, make: Callable[[int], Rollout] | None = None) -> None:
        super().__init__(len(facts), make or facts.rollout)
        self.facts = facts

    def pick(self, places: Ints) -> OutlinedRollouts:
        return OutlinedRollouts(self.facts.pick(places), lambda i: self[int(places[i])])

    @classmethod
    def joined(cls, parts: Sequence[OutlinedRollouts]) -> OutlinedRollouts:
        """Return all completions of the parts: the same objects."""
        edges = list(accumulate(map(len, parts), initial=0))

        def find(i: int) -> Rollout:
            part = bisect_right(edges, i) - 1
            return parts[part][i - edges[part]]

        return cls(Facts.joined([part.facts for part in parts]), find)


def versions(rollouts: Sequence[Rollout]) -> Ints:
    """Return the version of the weights of each completion; with several, the oldest."""
    if isinstance(rollouts, OutlinedRollouts):
        return rollouts.facts.version
    return np.array([rollout.weights_version for rollout in rollouts], np.int64)


def all_have_logprobs(rollouts: Sequence[Rollout]) -> bool:
    if isinstance(rollouts, OutlinedRollouts):
        return bool(rollouts.facts.has_logprobs.all())
    return all(sequence.logprobs is not None for rollout in rollouts for sequence in rollout.sequences)


class Spans(NamedTuple):
    """The spans of weights of completions, one after the other, each [spans]."""

    numbers: Ints  # place of the completion
    versions: Ints
    tokens: Ints


def spans(rollouts: Sequence[Rollout]) -> Spans:
    """Return Rollout.spans_of_weights of all completions."""
    if isinstance(rollouts, OutlinedRollouts):
        facts = rollouts.facts
        [rare] = facts.rare.nonzero()
        several = np.array([place for place in rare.tolist() if facts.rare[place][2]], np.int64)
        every = np.arange(len(rollouts))
        if not len(several):
            return Spans(every, facts.version, facts.sampled)
        alone = np.setdiff1d(every, several, assume_unique=True)
        of_several = spans([rollouts[place] for place in several.tolist()])
        numbers = np.concatenate([alone, several[of_several.numbers]])
        order = np.argsort(numbers, kind="stable")
        return Spans(
            numbers[order],
            np.concatenate([facts.version[alone], of_several.versions])[order],
            np.concatenate([facts.sampled[alone], of_several.tokens])[order],
        )
    parts = [rollout.spans_of_weights for rollout in rollouts]
    table = np.array([*chain.from_iterable(parts)], np.int64).reshape(-1, 2)
    return Spans(np.repeat(np.arange(len(parts)), [len(part) for part in parts]), table[:, 0], table[:, 1])
