"""Rows of experts are read back bit for bit; anything else is refused, and never decompressed beyond its shape."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.generation.protocol.messages import Completion, InvalidMessage
from swift_megatron_grpo.packing.expert_rows import decode_rows, encode_rows

ROWS = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["uint8", "uint16", ">u2"]),
    st.integers(0, 2**32 - 1),
)
def test_rows_are_read_back_bit_for_bit(shape: tuple[int, int, int], kind: str, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 250 if kind == "uint8" else 60000, shape).astype(kind)
    back = decode_rows(json.loads(json.dumps(encode_rows(rows))))
    assert back is not None and back.shape == rows.shape and np.array_equal(back, rows)
    assert back.dtype == rows.dtype.newbyteorder("<")


def test_a_completion_carries_them_both_ways() -> None:
    completion = Completion([1, 2], [3, 4, 5], [-1.0] * 3, "x", "stop", 7, routed_experts=ROWS)
    back = Completion.from_json(json.loads(json.dumps(completion.to_json())))
    assert back == completion and np.array_equal(back.routed_experts, ROWS)  # type: ignore[arg-type]
    assert encode_rows(None) is None and decode_rows(None) is None


def test_their_type_is_a_class_with_every_numpy() -> None:
    """numpy 2.5 on Python 3.12 has made NDArray an alias of another kind, and servers refused completions with rows."""
    rows, nothing = get_args(get_type_hints(Completion)["routed_experts"])
    assert get_origin(rows) is np.ndarray and nothing is type(None)


def message(**changes: Any) -> dict[str, Any]:
    encoded = encode_rows(ROWS)
    assert encoded is not None
    return {**encoded, **changes}


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "no object with shape, type and zlib"),
        ({"shape": [1, 1, 1], "type": "uint8"}, "no object with shape, type and zlib"),
        (message(more=1), "no object with shape, type and zlib"),
        (message(shape=[4, 3]), "no list of three positive numbers"),
        (message(shape=[4, 3, -2]), "no list of three positive numbers"),
        (message(shape=[4, 3, True]), "no list of three positive numbers"),
        (message(shape=[4, 3, 2.0]), "no list of three positive numbers"),
        (message(type="float32"), "their type is none of uint8, uint16"),
        (message(type=["uint8"]), "their type is none of uint8, uint16"),
        (message(shape=[2**20, 2**10, 2**10]), "announces more than"),
        (message(shape=[5, 3, 2]), "other than the 30 bytes"),
        (message(type="uint16"), "other than the 48 bytes"),
        (message(zlib=packed(bytes(25))), "other than the 24 bytes"),
        (message(zlib=None), "no base64 of zlib"),
        (message(zlib="%%%%"), "no base64 of zlib"),
        (message(zlib=base64.b64encode(b"no zlib").decode()), "no base64 of zlib"),
    ],
)
def test_anything_else_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode_rows(value)


def test_a_bomb_is_not_decompressed() -> None:
    bomb = packed(bytes(2**28))  # 256 MiB of zeros
    with pytest.raises(ValueError, match="other than the 24 bytes"):
        decode_rows(message(zlib=bomb))


def test_a_completion_with_other_rows_is_no_valid_message() -> None:
    completion = Completion([1, 2], [3, 4, 5], [-1.0] * 3, "x", "stop", 7, routed_experts=ROWS).to_json()
    with pytest.raises(InvalidMessage, match="'routed_experts': their shape"):
        Completion.from_json({**completion, "routed_experts": message(shape="")})
