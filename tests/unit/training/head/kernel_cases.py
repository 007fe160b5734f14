"""Compares the Triton kernels with the same functions in torch: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.training.head.kernel_cases      runs the cases
python -m tests.unit.training.head.kernel_cases compile     compiles the kernels for an H100 or H200, without a GPU
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from swift_megatron_grpo.training.head import softmax, softmax_triton
from swift_megatron_grpo.training.head.row_statistics import Vocabulary
from swift_megatron_grpo.training.head.softmax import combine


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    columns: int
    real: int
    first: int = 0
    dtype: torch.dtype = torch.bfloat16
    temperature: float = 0.9
    scale: float = 4.0


CASES = [
    Case("one block", 3, 100, 100),
    Case("several blocks, the last one ragged", 5, 20_001, 20_001),
    Case("fp32", 4, 9_000, 9_000, dtype=torch.float32),
    Case("a middle part of the vocabulary, with padding", 4, 5_000, 4_990, first=5_000),
    Case("nothing but padding", 2, 300, 0, first=300),
    Case("one row", 1, 16_384, 16_384, temperature=1.3),
    Case("extreme", 3, 9_000, 9_000, scale=1e4, dtype=torch.float32),
    Case("all logits equal", 2, 17_000, 17_000, scale=0.0),
    Case("no rows", 0, 500, 500),
]


def check(case: Case, entropy: bool, device: str) -> None:
    """Compare both kernels with torch, and check that the first one does not write."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(case.rows, case.columns, generator=generator) * case.scale).to(case.dtype)
    targets = torch.randint(0, 15_000 if case.first else case.columns, (case.rows,), generator=generator)
    if case.rows:
        targets[0] = case.first + max(case.real, 1) - 1  # the last token of this part
    vocabulary = Vocabulary(case.first, case.real, case.temperature, None)

    expected = softmax.sums_of_rows(logits, targets, vocabulary, entropy)
    on_device = logits.to(device, copy=True)
    sums = softmax_triton.sums_of_rows(on_device, targets.to(device), vocabulary, entropy)
    assert torch.equal(on_device.cpu(), logits), "the first kernel must not write"
    torch.testing.assert_close(sums.cpu(), expected, rtol=2e-6, atol=2e-6)

    upstream = torch.randn(case.rows, 1 + entropy, generator=generator)
    # Of this part of the vocabulary only; the other parts would only increase log_total.
    stats = combine([expected, torch.zeros_like(expected)], case.temperature)
    moved = softmax.RowStats(
        *(None if value is None else value.to(device) for value in (stats.logprob, stats.peak, stats.log_total,
                                                                     stats.entropy))  # type: ignore[arg-type]
    )  # fmt: skip
    gradient = softmax.to_gradient_(logits.clone(), targets, stats, upstream, vocabulary)
    overwritten = softmax_triton.to_gradient_(on_device, targets.to(device), moved, upstream.to(device), vocabulary)
    assert overwritten.data_ptr() == on_device.data_ptr() and overwritten.dtype == case.dtype
    close = {"rtol": 1e-5, "atol": 1e-6} if case.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(overwritten.cpu(), gradient, **close)
    assert not overwritten[:, case.real :].any()


def check_nan(device: str) -> None:
    """Check that one NaN among the logits, also one that is neither target nor maximum, makes its row NaN."""
    logits = torch.zeros(2, 10_000, device=device)
    logits[1, 9_999] = torch.nan
    targets = torch.zeros(2, dtype=torch.long, device=device)
    vocabulary = Vocabulary(0, 10_000, 1.0, None)
    columns = combine([softmax_triton.sums_of_rows(logits, targets, vocabulary, True)], 1.0).columns()
    assert columns[0].isfinite().all() and columns[1].isnan().all()


def compile_for_hopper(entropy: bool, logits: str) -> None:
    """Compile the kernels for arguments as in a launch; the interpreter accepts much that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {"columns": "i32", "real": "i32", "first": "i32", "inverse_temperature": "fp32"}
    constants = {"ENTROPY": "constexpr", "BLOCK": "constexpr"}
    rows = dict.fromkeys(("peaks", "log_totals", "entropies", "upstream"), "*fp32")
    kernels = {
        softmax_triton._sums_of_rows: {"sums": "*fp32", "rows": "i32", **numbers, **constants},
        softmax_triton._to_gradient: {**rows, **numbers, **constants},
    }
    for kernel, rest in kernels.items():
        signature = {"logits": logits, "targets": "*i64", **rest}
        kinds = enumerate(signature.values())
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in kinds if kind not in ("fp32", "constexpr")}
        source = ASTSource(kernel, signature, {"ENTROPY": entropy, "BLOCK": 4096}, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert "v4" in compiled.asm["ptx"], "the kernel must load and store 16 bytes at a time"


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        for logits in ("*bf16", "*fp32"):
            for entropy in (False, True):
                compile_for_hopper(entropy, logits)
        print("compiled")
    else:
        for case in CASES:
            for entropy in (False, True):
                check(case, entropy, "cpu")
        check_nan("cpu")
        print(f"{2 * len(CASES) + 1} cases")
