"""Small datasets in JSON lines, loaded as a run loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_megatron_grpo.data.checks import no_prompt_dropped


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str) -> Any:
    from swift.dataset import load_dataset

    with no_prompt_dropped():
        return load_dataset(path, load_from_cache_file=False, remove_unused_columns=False)[0]


QUESTION = {"messages": [{"role": "user", "content": "1+1"}], "solution": "2"}
