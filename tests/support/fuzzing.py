"""Damaged requests for the attacks on a rollout server, chosen by a seeded generator."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

_TENSOR = {"name": "a", "dtype": "torch.float32", "shape": [1], "start_idx": 0, "end_idx": 4, "numel": 1}
STOCK_BODIES: dict[str, Any] = {
    "/infer/": {
        "infer_requests": [{"messages": [{"role": "user", "content": "hello"}]}],
        "request_config": {"max_tokens": 2, "seed": 3},
    },
    "/update_named_param/": {"name": "a", "dtype": "torch.float32", "shape": [1]},
    "/update_flattened_params/": {"metadatas": [_TENSOR]},
    "/reset_prefix_cache/": {},
    "/get_engine_type/": {},
}
_JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, 1e308, -(10**30), 2**63, 2**31, "", "a", "\x00", "\u2028", "NaN", "1", "a" * 5000,
    [], [[]], {}, {"a": {}}, [None], [True], {"type": "image"}, {"url": "http://127.0.0.1:1"}, ["<image>"] * 50,
)  # fmt: skip


def damaged_body(body: Any, chooser: random.Random) -> bytes:
    """Return a body with one to three values replaced, removed or added, or damaged as bytes."""
    damaged = deepcopy(body)
    for _ in range(chooser.randint(0, 3)):
        damaged = _damaged(damaged, chooser)
    data = json.dumps(damaged).encode()
    kind = chooser.random()
    if kind < 0.1:
        return data[: chooser.randint(0, len(data))]
    if kind < 0.2:
        flipped = bytearray(data or b" ")
        flipped[chooser.randrange(len(flipped))] ^= 1 << chooser.randrange(8)
        return bytes(flipped)
    if kind < 0.25:
        return chooser.randbytes(chooser.randint(0, 2000))
    if kind < 0.28:
        return b"[" * chooser.randint(1, 20000)
    return data


def _damaged(value: Any, chooser: random.Random) -> Any:
    """Replace a value somewhere inside."""
    if isinstance(value, dict) and value and chooser.random() < 0.85:
        name = chooser.choice(list(value))
        if chooser.random() < 0.15:
            return {key: inner for key, inner in value.items() if key != name}
        if chooser.random() < 0.1:
            return value | {chooser.choice(("extra", "images", "n", "")): chooser.choice(_JUNK)}
        return value | {name: _damaged(value[name], chooser)}
    if isinstance(value, list) and value and chooser.random() < 0.7:
        place = chooser.randrange(len(value))
        return [*value[:place], _damaged(value[place], chooser), *value[place + 1 :]]
    return chooser.choice(_JUNK)
