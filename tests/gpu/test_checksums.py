"""The kernel of checksums on a GPU: torch's numbers, and how fast it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_kernel_computes_torchs_numbers() -> None:
    from tests.unit.weights.transport.checksum_kernel_cases import check, check_faults

    assert check("cuda") > 0
    check_faults("cuda")


def test_elements_beyond_32_bits_are_read() -> None:
    from swift_megatron_grpo.weights.transport.checksums import Batch, checksum

    weights = torch.zeros(2**31 + 100, dtype=torch.int8, device="cuda")
    weights[-1] = 3
    columns = weights.as_strided((50_000, 20_000), (40_000, 1))
    columns[-1, -1] = 5
    for tensor in (weights, columns):
        assert int(Batch([(tensor, None)], torch.bfloat16).sums()) == int(checksum(tensor, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_reads_at_least_300_gigabytes_a_second(
    dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """Read as many experts as two layers of Qwen3-30B-A3B have, in one launch, and without waiting for the host."""
    from swift_megatron_grpo.weights.transport.checksums import Batch

    experts = torch.randn(2, 3 * 128, 768, 2048, device="cuda").to(dtype).flatten(0, 1)
    batch = Batch([(expert, None) for expert in experts], dtype)
    batch.sums()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # type: ignore[no-untyped-call]
    for _ in range(10):
        batch.sums()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    speed = 10 * experts.nbytes / begin.elapsed_time(end) / 1e6
    record_property("gigabytes_per_second", round(speed))
    print(f"{dtype}: {speed:.0f} GB/s")
    assert speed > 300, "the bytes that are read in a second"
    assert torch.cuda.max_memory_allocated() - before < 2**20, "sums, and nothing as large as the weights"
