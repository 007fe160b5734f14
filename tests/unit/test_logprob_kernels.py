"""The Triton kernels in Triton's interpreter. On a GPU: tests/gpu/test_head.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.runs import REPOSITORY

pytest.importorskip("triton")


def test_kernels_in_the_interpreter_compute_what_torch_computes() -> None:
    # In a process of its own: whether to interpret is decided when triton is imported.
    done = subprocess.run([sys.executable, "-m", "tests.unit.kernel_cases"], cwd=REPOSITORY, capture_output=True,
                          text=True, env={**os.environ, "TRITON_INTERPRET": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith(" cases")
