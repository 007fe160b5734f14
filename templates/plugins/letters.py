"""Reward that a tiny random model can increase within a few dozen steps: the share of given letters in a completion.

    --external_plugins templates/plugins/letters.py --reward_funcs letters

Use it as a pattern for your own reward: a class in ms-swift's registry that is called with the completions and the
columns of the dataset, one entry per completion, and returns one number per completion.
"""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Letters(ORM):
    def __call__(self, completions: list[str], letters: list[str], **columns: Any) -> list[float]:
        return [share(completion, allowed) for completion, allowed in zip(completions, letters, strict=True)]


def share(completion: str, letters: str) -> float:
    """Return the share of characters that are among the letters, from 0 to 1; 0 for an empty completion."""
    if not completion:
        return 0.0
    return sum(character in letters for character in completion) / len(completion)


orms["letters"] = Letters
