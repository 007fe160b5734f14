"""The kernel of checksums without a GPU: in Triton's interpreter, and compiled. On one: tests/gpu/test_checksums.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking.client import python


def run(arguments: list[str], **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    pytest.importorskip("triton")
    done = python("-m", "tests.unit.weights.transport.checksum_kernel_cases", *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.nightly
def test_the_kernel_computes_torchs_numbers_in_the_interpreter() -> None:
    assert run([], TRITON_INTERPRET="1").endswith(" cases")


def test_the_kernel_compiles_for_a_gpu_and_writes_sums_only(tmp_path: Path) -> None:
    assert run(["compile"], TRITON_CACHE_DIR=str(tmp_path)) == "compiled"


def test_checksums_on_a_cpu_do_not_import_triton() -> None:
    code = (
        "import sys, torch; from swift_megatron_grpo.weights.load import loaded_weights; "
        "from swift_megatron_grpo.weights.transport.checksums import Checksums; sums = Checksums(torch.float32); "
        "sums.add(torch.ones(3)); assert sums.integers(); assert 'triton' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr[-4000:]
