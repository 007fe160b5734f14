"""An external plugin: a judge whose score is the number of characters of its answer."""

from __future__ import annotations

from typing import Any

from swift.rewards import rm_plugins


class Characters:
    def request(self, row: dict[str, Any]) -> dict[str, Any]:
        text = f"How good is this answer? {row['messages'][-1]['content'][:40]}"
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}

    def score(self, text: str) -> float:
        return float(len(text))


rm_plugins["characters"] = Characters
