"""The Triton kernels without a GPU: in Triton's interpreter, and compiled. On a GPU: tests/gpu/test_head.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

pytest.importorskip("triton")


def run(arguments: list[str], **environment: str) -> str:
    # In a process of its own: whether to interpret is decided when triton is imported.
    command = [sys.executable, "-m", "tests.unit.training.head.kernel_cases", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_in_the_interpreter_they_compute_what_torch_computes() -> None:
    assert run([], TRITON_INTERPRET="1").endswith(" cases")


def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    assert run(["compile"], TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
