"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled. On a GPU: tests/gpu/test_head.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking.client import python

pytest.importorskip("triton")


def run(arguments: list[str], **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    done = python("-m", "tests.unit.training.head.kernel_cases", *arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_the_kernels_compute_the_same_as_torch_in_the_interpreter() -> None:
    assert run([], TRITON_INTERPRET="1").endswith(" cases")


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert run(["compile"], TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
