"""torchvision can be imported next to a CPU build of torch, in any process, and not without this package's hook."""

from __future__ import annotations

import pytest
import torch

from tests.forking.client import run_code

pytest.importorskip("qwen_vl_utils", reason="torchvision is not installed")
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision has its operators")


def test_torchvision_is_importable_in_a_process_that_only_imports_torch() -> None:
    assert run_code("torch", "import torchvision.transforms; print('imported')") == "imported\n"


def test_it_is_not_importable_without_the_hook() -> None:
    """Fails once torchvision imports by itself; then delete torchvision_operators.py."""
    without = "sys.meta_path[:] = [f for f in sys.meta_path if 'swift_megatron_grpo' not in type(f).__module__]"
    with pytest.raises(RuntimeError, match="operator torchvision::nms does not exist"):
        run_code("torch", f"import sys, torch; {without}; import torchvision")
