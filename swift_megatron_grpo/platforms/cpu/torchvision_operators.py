"""Makes torchvision importable next to a CPU build of torch.

Upstream: PyPI has torchvision with CUDA only. Its library of operators then cannot be loaded, which torchvision
accepts, but its next import registers shapes for two operators of that library and fails: "operator torchvision::nms
does not exist". transformers, and with it ms-swift and vLLM, imports torchvision wherever it is installed, and the
processors of models with images need it.

Fix: declare the two operators, without an implementation, if the library could not be loaded. Image transforms do not
use them.

Tests: tests/unit/platforms/cpu/test_torchvision_operators.py fails once torchvision imports without this.
"""

from __future__ import annotations

from typing import Any

from swift_megatron_grpo.import_hooks import after_import

_OPERATORS = ("nms", "qnms")
_kept: list[Any] = []  # an operator disappears with the object that declared it


def hook_torchvision() -> None:
    """Declare the operators when torchvision is imported. Costs nothing in a process that never imports it."""
    after_import("torchvision.extension", declare_missing_operators)


def declare_missing_operators(extension: Any) -> None:
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
