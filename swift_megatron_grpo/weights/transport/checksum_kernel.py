"""Checksums of many tensors in one launch of a Triton kernel, which reads each element once. Imported on CUDA only.

A program adds up a part of one block, a tensor or a slice of rows and columns, and adds its sum to the tensor's. The
arithmetic is that of checksums.py. Nothing is as large as the tensors: a block takes 88 bytes of the GPU, a program 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

_TILES = {True: (1, 4096), False: (64, 64)}  # rows and columns that a program reads at a time, by "of one row"
_STEPS = 16  # neighbouring tiles that a program reads
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by bytes of an element
_FIRST, _SECOND = tl.constexpr(-7046029254386353131), tl.constexpr(-4658895280553007687)  # factors of a weight
_FIELDS = tl.constexpr(11)  # of a block, the number of programs of the blocks before it, and of its own


class Block(NamedTuple):
    """Rows and columns of elements: where they are in memory, and at which positions of the whole tensor."""

    address: int
    rows: int
    columns: int
    row_bytes: int  # from one row to the next
    column_bytes: int
    position: int  # of the first element
    row_positions: int  # from one row to the next
    column_positions: int
    tensor: int  # index of the sum


def blocks(tensor: torch.Tensor, part: TensorSlice | None, index: int) -> list[Block]:
    """Return the blocks of a tensor, whose sum has this index: one, or some if it has more than two dimensions left."""
    size = tensor.element_size()
    if not tensor.numel():
        return []
    if part is None and tensor.is_contiguous():  # as below, in a tenth of the time: a trainer sends some 10,000
        return [Block(tensor.data_ptr(), 1, tensor.numel(), 0, size, 0, 0, 1, index)]
    part = part or TensorSlice.whole(tensor.shape)
    dimensions: list[tuple[int, int, int]] = []  # length, stride in bytes, stride in positions
    found = zip(tensor.shape, (size * stride for stride in tensor.stride()), part.strides, strict=True)
    for length, in_memory, of_positions in sorted(found, key=lambda dimension: -dimension[1]):
        if length == 1:
            continue
        if dimensions and dimensions[-1][1:] == (length * in_memory, length * of_positions):
            length *= dimensions.pop()[0]
        dimensions.append((length, in_memory, of_positions))
    columns = dimensions.pop() if dimensions else (1, 0, 0)
    rows = max(dimensions, default=(1, 0, 0))
    if dimensions:
        dimensions.remove(rows)
    return [
        Block(
            tensor.data_ptr() + sum(place * in_memory for place, (_, in_memory, _) in zip(at, dimensions, strict=True)),
            rows[0],
            columns[0],
            rows[1],
            columns[1],
            part.offset + sum(place * positions for place, (*_, positions) in zip(at, dimensions, strict=True)),
            rows[2],
            columns[2],
            index,
        )
        for at in product(*(range(length) for length, *_ in dimensions))
    ]


class Sums:
    """Sums over slices of tensors, prepared for any number of launches while the slices stay in the same memory."""

    def __init__(self, slices: Iterable[tuple[int, torch.Tensor, TensorSlice | None]]) -> None:
        """`slices`: the index of a sum, elements, and the slice of a sent tensor that they are; None: it is whole."""
        alike: dict[tuple[int, bool], list[Block]] = {}
        device = torch.device("cpu")
        for index, tensor, part in slices:
            device = tensor.device
            for block in blocks(tensor, part, index):
                alike.setdefault((tensor.element_size(), block.rows == 1), []).append(block)
        self._launches = [_Launch(of_one_shape, *shape, device) for shape, of_one_shape in alike.items()]

    def add_to(self, sums: torch.Tensor) -> None:
        """Add up all slices. `sums`: [tensors] int64, on the device of the slices."""
        for launch in self._launches:
            launch(sums)


class _Launch:
    """One launch for blocks of elements of `size` bytes."""

    def __init__(self, blocks: list[Block], size: int, of_one_row: bool, device: torch.device) -> None:
        self._integer = _INTEGERS[size]
        self._rows, self._columns = _TILES[of_one_row]
        self._width = _STEPS * self._columns
        fields = np.array(blocks)
        programs = -(-fields[:, 1] // self._rows) * -(-fields[:, 2] // self._width)
        self._programs = int(programs.sum())
        table = torch.from_numpy(np.column_stack([fields, programs.cumsum() - programs, programs]))
        if device.type == "cuda":
            table = table.pin_memory()
        table = table.to(device, non_blocking=True)
        self._table = table
        self._block_of_program = torch.repeat_interleave(table[:, -1].int(), output_size=self._programs)

    def __call__(self, sums: torch.Tensor) -> None:
        _add_up[(self._programs,)](
            self._table, self._block_of_program, sums,
            INTEGER=self._integer, ROWS=self._rows, COLUMNS=self._columns, WIDTH=self._width, num_warps=8,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]  # Triton compiles annotations too, and accepts constexpr only
    table,  # [blocks, _FIELDS] int64
    block_of_program,  # [programs] int32
    sums,  # [tensors] int64
    INTEGER: tl.constexpr,  # type of the elements' bits
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a program
) -> None:
    program = tl.program_id(0).to(tl.int64)
    block = table + tl.load(block_of_program + program) * _FIELDS
    address = tl.load(block)
    rows = tl.load(block + 1)
    columns = tl.load(block + 2)
    row_bytes = tl.load(block + 3)
    column_bytes = tl.load(block + 4)
    position = tl.load(block + 5)
    row_positions = tl.load(block + 6)
    column_positions = tl.load(block + 7)
    program -= tl.load(block + 9)
    across = (columns + WIDTH - 1) // WIDTH  # programs
    row = program // across * ROWS + tl.arange(0, ROWS)[:, None]
    begin = program % across * WIDTH
    end = tl.minimum(begin + WIDTH, columns)
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    # What is linear in the position is computed for rows and columns, not for elements.
    of_rows = address + row * row_bytes
    of_columns = column * column_bytes
    mixed_of_rows = (position + row * row_positions) * _FIRST
    mixed_of_columns = column * column_positions * _FIRST
    total = tl.zeros([ROWS, COLUMNS], tl.int64)
    for at in range(begin, end, COLUMNS):
        elements = (of_rows + at * column_bytes + of_columns).to(tl.pointer_type(INTEGER))
        bits = tl.load(elements, mask=(row < rows) & (at + column < columns), other=0).to(tl.int64)
        mixed = mixed_of_rows + at * column_positions * _FIRST + mixed_of_columns
        mixed = (mixed ^ (mixed >> 29)) * _SECOND
        total += bits * ((mixed ^ (mixed >> 32)) | 1)
    tl.atomic_add(sums + tl.load(block + 8), tl.sum(tl.sum(total, 1), 0))
