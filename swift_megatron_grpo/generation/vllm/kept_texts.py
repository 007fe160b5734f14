"""Completions that have ended, on the device: one after the other in a ring, where the oldest make room."""

from collections import deque
from collections.abc import Callable, Sequence

import torch

TOKENS = 2**24  # in 4 bytes each
TEXTS = 2**14


class KeptTexts:
    """Texts by number. `forget` gets the number of a text that makes room, before another text has the number."""

    def __init__(
        self, device: torch.device, forget: Callable[[int], None], tokens: int = TOKENS, texts: int = TEXTS
    ) -> None:
        self._forget = forget
        self._held: deque[tuple[int, int, int]] = deque()  # number, begin and end of each text, the oldest first
        self._number = self._place = 0  # of the next text
        self.tokens = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.begins = torch.zeros(texts, dtype=torch.int64, device=device)
        self.starts = torch.zeros(texts, dtype=torch.int32, device=device)  # the first place that a draft may follow
        self.lengths = torch.zeros(texts, dtype=torch.int32, device=device)

    def add(self, tokens: Sequence[int], start: int) -> int | None:
        """Keep a text; return its number, or None if it has no room."""
        here = torch.tensor(tokens, dtype=torch.int32)
        return self.copy(here.pin_memory() if self.tokens.is_cuda else here, len(tokens), start)

    def copy(self, tokens: torch.Tensor, length: int | torch.Tensor, start: int) -> int | None:
        """Keep the first `length` of some tokens, which the device may know alone."""
        size = len(tokens)
        if size > len(self.tokens):
            return None
        if self._place + size > len(self.tokens):
            self._drop(self._place, len(self.tokens))
            self._place = 0
        self._drop(self._place, self._place + size)
        if len(self._held) == len(self.begins):
            self._forget(self._held.popleft()[0])
        number, begin = self._number, self._place
        self._held.append((number, begin, begin + size))
        self._number, self._place = (number + 1) % len(self.begins), begin + size
        self.tokens[begin : begin + size].copy_(tokens, non_blocking=True)
        self.begins[number], self.starts[number] = begin, start
        self.lengths[number] = length
        return number

    def _drop(self, begin: int, end: int) -> None:
        """Drop the texts in these places, which are the oldest: a ring is written in their order."""
        while self._held and self._held[0][1] < end and self._held[0][2] > begin:
            self._forget(self._held.popleft()[0])
