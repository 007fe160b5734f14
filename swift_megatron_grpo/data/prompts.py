"""Prompts in an order that depends only on the seed, not on layout or batch sizes, so that a resumed run continues."""

from collections.abc import Sequence
from typing import Any

import torch

from swift_megatron_grpo.data.images import with_listed_images
from swift_megatron_grpo.types import Prompt


class PromptSource:
    """An endless sequence of prompts; every rank has the same one and takes the same prompts."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        seed: int,
        shuffle: bool,
        default_system: str | None = None,  # the template's, for rows without a system message
        taken: int = 0,
        label: str = "",  # prefix of prompt ids, to distinguish them from those of another source
    ) -> None:
        if len(rows) == 0:
            raise ValueError("the training dataset has no rows")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._default_system = default_system
        self.rows = len(rows)
        self.taken = taken
        self._label = label
        self._order_of_epoch = (-1, [0])

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        places = [divmod(number, self.rows) for number in range(self.taken, self.taken + count)]
        self.taken += count
        return [self._prompt(epoch, self._order(epoch)[place]) for epoch, place in places]

    def find(self, prompt_id: str) -> Prompt | None:
        """Return the prompt with this id; None if it is another source's, or if the dataset has no such row."""
        epoch, _, row = prompt_id.removeprefix(self._label).partition("-")
        if not (prompt_id.startswith(self._label) and epoch.isdecimal() and row.isdecimal()):
            return None
        return self._prompt(int(epoch), int(row)) if int(row) < self.rows else None

    def _prompt(self, epoch: int, index: int) -> Prompt:
        row = with_listed_images(dict(self._rows[index]))
        if self._default_system and row["messages"][0]["role"] != "system":
            row["messages"] = [{"role": "system", "content": self._default_system}, *row["messages"]]
        return Prompt(prompt_id=f"{self._label}{epoch}-{index}", row=row)

    def _order(self, epoch: int) -> list[int]:
        if self._order_of_epoch[0] != epoch:
            order = shuffled(self.rows, self._seed + epoch) if self._shuffle else list(range(self.rows))
            self._order_of_epoch = (epoch, order)
        return self._order_of_epoch[1]


def shuffled(rows: int, seed: int) -> list[int]:
    """Return the numbers of all rows in the order of a seed."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
