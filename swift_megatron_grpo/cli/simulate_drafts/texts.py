"""Drafts without a draft model, from texts that share a prompt: what came after the last tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_MATCHED = 4  # tokens; longer matches draft nothing better


class _Seen(NamedTuple):
    """A token that came after some tokens: how often, and where it did so last."""

    times: int
    number: int  # of the newest, counted over all tokens
    text: Sequence[int]
    place: int


class Texts:
    """A prompt, what its running requests have generated so far, and earlier completions of it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._after: dict[tuple[int, ...], dict[int, _Seen]] = {}
        self._tokens = 0
        self.add(prompt, begin=1)

    def add(self, text: Sequence[int], begin: int) -> None:
        """Remember the tokens from `begin` on, each after those before it. `text` may grow later, not change."""
        for place in range(begin, len(text)):
            token = text[place]
            self._tokens += 1
            for size in range(1, min(MOST_MATCHED, place) + 1):
                seen = self._after.setdefault(tuple(text[place - size : place]), {})
                times = seen[token].times if token in seen else 0
                seen[token] = _Seen(times + 1, self._tokens, text, place)

    def draft(self, text: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens for the end of `text`.

        The longest end that occurred before decides. Of the tokens that came after it the most frequent one is
        drafted, among equals the newest, with what followed at its newest place.
        """
        for size in range(min(MOST_MATCHED, len(text)), 0, -1):
            seen = self._after.get(tuple(text[len(text) - size :]))
            if seen:
                best = max(seen.values(), key=lambda token: (token.times, token.number))
                return best.text[best.place : best.place + most]
        return ()
