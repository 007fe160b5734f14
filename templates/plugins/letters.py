"""A reward that a random tiny model can climb in a few dozen steps: the share of wanted letters in the completion.

    --external_plugins templates/plugins/letters.py --reward_funcs letters

It is also the shape of a reward of your own: a class in ms-swift's registry, called with the completions and with the
columns of the dataset, one entry per completion; it returns one number per completion.
"""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Letters(ORM):
    def __call__(self, completions: list[str], letters: list[str], **columns: Any) -> list[float]:
        return [share(completion, wanted) for completion, wanted in zip(completions, letters, strict=True)]


def share(completion: str, wanted: str) -> float:
    """How much of the completion is made of the wanted letters, 0 to 1; nothing written earns nothing."""
    if not completion:
        return 0.0
    return sum(character in wanted for character in completion) / len(completion)


orms["letters"] = Letters
