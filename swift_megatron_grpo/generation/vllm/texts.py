"""Drafts without a draft model, from texts that share a prompt: what came after the last tokens before."""

from collections.abc import Sequence

MOST_MATCHED = 4  # tokens; longer matches draft nothing better


class _After:
    """The continuation of some tokens: the token that did so most often, among equals the newest, and where last."""

    __slots__ = ("others", "place", "text", "times", "token")

    def __init__(self, token: int, text: Sequence[int], place: int) -> None:
        self.token, self.times = token, 1
        self.text, self.place = text, place
        self.others: dict[int, int] | None = None  # how often each token came; None: no other has come

    def add(self, token: int, text: Sequence[int], place: int) -> None:
        if self.others is None and token != self.token:
            self.others = {self.token: self.times}
        if self.others is None:
            times = self.times + 1
        else:
            times = self.others[token] = self.others.get(token, 0) + 1
        if times >= self.times:
            self.token, self.times, self.text, self.place = token, times, text, place


class Texts:
    """A prompt, what its running requests have generated so far, and earlier completions of it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._after: dict[tuple[int, ...], _After] = {}
        self.add(prompt, begin=1)

    def add(self, text: Sequence[int], begin: int) -> None:
        """Remember the tokens from `begin` on, each after those before it. `text` may grow later, not change."""
        after = self._after
        for place in range(begin, len(text)):
            token = text[place]
            for start in range(max(place - MOST_MATCHED, 0), place):
                key = tuple(text[start:place])
                seen = after.get(key)
                if seen is None:
                    after[key] = _After(token, text, place)
                else:
                    seen.add(token, text, place)

    def draft(self, text: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens for the end of `text`.

        The longest end that occurred before decides. Of the tokens that came after it the most frequent one is
        drafted, among equals the newest, with what followed at its newest place.
        """
        for start in range(max(len(text) - MOST_MATCHED, 0), len(text)):
            seen = self._after.get(tuple(text[start:]))
            if seen is not None:
                return seen.text[seen.place : seen.place + most]
        return ()
