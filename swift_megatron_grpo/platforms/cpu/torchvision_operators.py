"""Makes torchvision importable next to a CPU build of torch.

Upstream: PyPI has torchvision with CUDA only. Its library of operators then cannot be loaded, which torchvision
accepts, but its next import registers shapes for two operators of that library and fails: "operator torchvision::nms
does not exist". transformers, and with it ms-swift and vLLM, imports torchvision wherever it is installed, and the
processors of models with images need it.

Fix: declare the two operators, without an implementation, if the library could not be loaded. Image transforms do not
use them.

Tests: tests/unit/platforms/cpu/test_torchvision_operators.py fails once torchvision imports without this.
"""

import sys
from importlib.machinery import ModuleSpec
from typing import Any

from swift_megatron_grpo.runtime.import_hooks import after_import

_OPERATORS = ("nms", "qnms")
_kept: list[Any] = []  # an operator disappears with the object that declared it


def find_with_operators(name: str, path: Any) -> ModuleSpec | None:
    """Find torchvision.extension, which is being imported, such that the operators are declared right after it ran."""
    after_import(name, declare_missing_operators)
    for finder in tuple(sys.meta_path):  # the hook of after_import comes first
        spec: ModuleSpec | None = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def declare_missing_operators(extension: Any) -> None:
    if _kept or extension._has_ops():  # it may be looked for more than once
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
