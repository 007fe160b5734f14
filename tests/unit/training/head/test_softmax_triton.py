"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled. On a GPU: tests/gpu/test_head.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

pytest.importorskip("triton")


def run(arguments: list[str], **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    command = [sys.executable, "-m", "tests.unit.training.head.kernel_cases", *arguments]
    process = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, env={**os.environ, **environment})
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.strip()


def test_the_kernels_compute_the_same_as_torch_in_the_interpreter() -> None:
    assert run([], TRITON_INTERPRET="1").endswith(" cases")


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert run(["compile"], TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
