"""Compares the kernel of checksums with torch's arithmetic: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.weights.transport.checksum_kernel_cases      runs the cases
python -m tests.unit.weights.transport.checksum_kernel_cases compile     compiles it for an H100 or H200, without a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod

import torch

from swift_megatron_grpo.weights.transport import checksum_kernel as kernels
from swift_megatron_grpo.weights.transport.checksums import checksum
from swift_megatron_grpo.weights.transport.held_weights import TensorSlice

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)  # fmt: skip
SHAPES = ((), (1,), (5,), (4097,), (70_001,), (3, 5), (65, 130), (130, 1100), (2, 3, 4, 5), (0, 4), (7, 1, 9))
FAR = 2**40 + 7  # a position that 32 bits do not hold


def slice_of(part: torch.Tensor, base: torch.Tensor, far: int = 0) -> TensorSlice:
    """Return the slice of `base`, a contiguous tensor, that the view `part` of it is."""
    return TensorSlice(part.storage_offset() - base.storage_offset() + far, tuple(part.shape), part.stride())


def slices(dtype: torch.dtype, device: str) -> Iterator[tuple[torch.Tensor, TensorSlice | None]]:
    """Yield whole tensors and slices, contiguous or not, where they were sent and where an engine has put them."""
    generator = torch.Generator().manual_seed(0)
    most = 10**6 if dtype in (torch.bfloat16, torch.float32) else 10_000  # elements: the interpreter is slow
    for shape in (shape for shape in SHAPES if prod(shape) <= most):
        whole = (torch.randn(shape, generator=generator) * 100).to(dtype).to(device)
        yield whole, None
        if whole.ndim < 2:
            continue
        yield whole.transpose(0, -1), None
        for part in (whole[1:], whole[:, :1], whole.narrow(-1, 1, whole.shape[-1] - 1), whole[..., ::2]):
            yield part, None
            for far in (0, FAR):
                yield part, slice_of(part, whole, far)
                yield part.contiguous(), slice_of(part, whole, far)
        moved = whole.transpose(0, 1)
        yield moved.contiguous(), slice_of(moved, whole)  # as a layer that is stored transposed
        yield whole[:1].expand(3 * len(whole[:1]), *whole.shape[1:]), None
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], device=device)
    yield special.to(dtype) if dtype.is_floating_point else special.isnan().to(dtype), None


def check(device: str) -> int:
    """Compute all checksums in one batch per type, twice, and compare them bit for bit with torch on the CPU."""
    number = 0
    for dtype in DTYPES:
        cases = list(slices(dtype, device))
        sums = kernels.Sums((index, *case) for index, case in enumerate(cases))
        found = torch.zeros(len(cases), dtype=torch.int64, device=device)
        sums.add_to(found)
        for index, (tensor, part) in enumerate(cases):
            expected = checksum(tensor.cpu(), dtype, part)
            assert int(found[index]) == int(expected), (dtype, tuple(tensor.shape), tensor.stride(), part)
        twice = found.clone()
        sums.add_to(twice)
        assert torch.equal(twice, 2 * found), "a prepared launch must give the same sums again"
        number += len(cases)
    return number


def check_faults(device: str) -> None:
    """Change one bit, swap two tensors, and keep an old one: only the sums of those tensors differ."""
    weights = [torch.randn(300, 200, device=device).to(torch.bfloat16) for _ in range(4)]
    sums = kernels.Sums((index, weight, None) for index, weight in enumerate(weights))

    def read() -> torch.Tensor:
        found = torch.zeros(4, dtype=torch.int64, device=device)
        sums.add_to(found)
        return found

    sent = read()
    weights[1].view(torch.int16)[299, 199] ^= 1
    assert (read() != sent).tolist() == [False, True, False, False]
    weights[1].view(torch.int16)[299, 199] ^= 1
    two, three = weights[2].clone(), weights[3].clone()
    weights[2].copy_(three)
    weights[3].copy_(two)
    assert (read() != sent).tolist() == [False, False, True, True]
    assert read().sum() == sent.sum(), "whose sums have changed places"
    weights[2].copy_(two)
    weights[3].copy_(three * 1.01)
    assert (read() != sent).tolist() == [False, False, False, True]


def compile_for_hopper() -> None:
    """Compile the kernel for arguments as in a launch; the interpreter accepts much that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = {"table": "*i64", "block_of_program": "*i32", "sums": "*i64"}
    for integer in kernels._INTEGERS.values():
        for rows, columns in kernels._TILES.values():
            width = kernels._STEPS * columns
            constants = {"INTEGER": integer, "ROWS": rows, "COLUMNS": columns, "WIDTH": width}
            signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(kernels._add_up, signature, constants, {})
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
            text = compiled.asm["ptx"]
            assert text.count("atom.") == 1 and "st.global" not in text, "a program writes one sum and nothing else"
            assert "st.local" not in text and "ld.local" not in text


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_for_hopper()
        print("compiled")
    else:
        print(f"{check('cpu')} cases")
        check_faults("cpu")
