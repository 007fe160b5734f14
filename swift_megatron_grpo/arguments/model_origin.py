"""The hub that a model's folder came from.

Before it trains, ms-swift asks ModelScope whether the model is the latest (`--check_model`, on by default). For a
folder that ModelScope's client has not written, it asks for a model named `unknown`: in vain, and without a network
connection for 22 seconds.
"""

from __future__ import annotations

from pathlib import Path

WRITTEN_BY_CLIENT = (".mdl", ".git")  # where the client reads the name of the model


def is_from_modelscope(folder: str) -> bool:
    return any(Path(folder, name).exists() for name in WRITTEN_BY_CLIENT)
