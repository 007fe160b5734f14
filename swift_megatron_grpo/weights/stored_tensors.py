"""Shapes and sizes of a checkpoint's tensors, from the headers of its files: safetensors returns no sizes."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    bytes: int


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors in this folder by name; none are read."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    entries: dict[str, Any] = {}
    for file in (Path(folder) / name for name in names):
        if file.exists():
            with file.open("rb") as stream:
                entries |= json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries.items()
    }
