"""Rows of experts as JSON: compressed, as base64, with shape and type. Between server and trainer, and in dumps.

A row has a byte per layer and expert (two with more than 256 experts), so a token of a model with 48 layers and 8
experts per token takes 384 bytes. Compression makes up for half of what base64 adds: a random choice of 8 of 128
experts takes 1.17 bytes per byte.
"""

import base64
import zlib
from math import prod
from typing import Any

import numpy as np

from swift_megatron_grpo.types import ExpertRows

_TYPES = ("uint8", "uint16")
MAX_BYTES = 2**31  # of one completion, decompressed


def encode_rows(rows: ExpertRows | None) -> dict[str, Any] | None:
    """Return rows [rows, layers, k] in JSON types."""
    if rows is None:
        return None
    packed = zlib.compress(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes(), 1)
    return {"shape": list(rows.shape), "type": rows.dtype.name, "zlib": base64.b64encode(packed).decode("ascii")}


def decode_rows(message: object) -> ExpertRows | None:
    """Return the rows that `encode_rows` has encoded, decompressing no more than they announce; raise ValueError."""
    if message is None:
        return None
    if not isinstance(message, dict) or set(message) != {"shape", "type", "zlib"}:
        raise ValueError("they are no object with shape, type and zlib")
    shape = message["shape"]
    kind = message["type"]
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise ValueError("their shape is no list of three positive numbers")
    if kind not in _TYPES:
        raise ValueError(f"their type is none of {', '.join(_TYPES)}")
    dtype: np.dtype[Any] = np.dtype(kind).newbyteorder("<")
    size = prod(shape) * dtype.itemsize
    if size > MAX_BYTES:
        raise ValueError(f"their shape announces more than {MAX_BYTES} bytes")
    try:  # at most one byte more than announced
        content = zlib.decompressobj().decompress(base64.b64decode(message["zlib"], validate=True), size + 1)
    except (TypeError, ValueError, zlib.error):
        raise ValueError("they are no base64 of zlib") from None
    if len(content) != size:
        raise ValueError(f"they have other than the {size} bytes that their shape announces")
    rows: ExpertRows = np.frombuffer(content, dtype).reshape(shape)
    return rows
