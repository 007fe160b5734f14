"""torchvision can be imported next to a CPU build of torch, in any process, and not without this package's hook."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.paths import REPOSITORY

pytest.importorskip("qwen_vl_utils", reason="torchvision is not installed")
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision has its operators")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)


def test_torchvision_is_importable_in_a_process_that_only_imports_torch() -> None:
    result = run("import torchvision.transforms; print('imported')")
    assert result.stdout == "imported\n", result.stderr


def test_it_is_not_importable_without_the_hook() -> None:
    """Fails once torchvision imports by itself; then delete torchvision_operators.py."""
    result = run("import sys, torch; sys.meta_path[:] = [f for f in sys.meta_path if 'swift_megatron_grpo' not in "
                 "type(f).__module__]; import torchvision")  # fmt: skip
    assert "operator torchvision::nms does not exist" in result.stderr
