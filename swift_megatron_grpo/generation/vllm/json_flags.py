"""Read flags whose value is a JSON object, in the trainer and in `swift rollout`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse_json_object(flag: str, value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the value of a flag that takes a JSON object, or the path of a JSON file, as in ms-swift.

    ms-swift repairs malformed JSON, which turns a missing quote into other settings.
    """
    if not isinstance(value, str):
        return dict(value or {})
    is_file = Path(value).is_file()
    source, text = (f"the file {value}", Path(value).read_text()) if is_file else ("the value", value)
    advice = f"""use the form --{flag} '{{"name": 1}}', or leave it out"""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise ValueError(
            f"--{flag}: {source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, near "
            f"{around!r}; {advice}"
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(f"--{flag}: {source} is not a JSON object but {json.dumps(parsed)[:40]}; {advice}")
    return parsed
