"""Small datasets in JSON lines, loaded as a run loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_megatron_grpo.data.checks import checked_loading


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(*paths: str, columns: dict[str, str] | None = None, shuffle: bool = False) -> Any:
    from swift.dataset import load_dataset

    options = {"load_from_cache_file": False, "remove_unused_columns": False, "columns": columns, "shuffle": shuffle}
    with checked_loading(columns):
        return load_dataset(list(paths), **options)[0]


QUESTION = {"messages": [{"role": "user", "content": "1+1"}], "solution": "2"}
