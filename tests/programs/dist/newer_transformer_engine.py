"""Layouts with what newer versions of Transformer Engine do differently; tests/dist/conftest.py starts the ranks."""

from __future__ import annotations

from unittest.mock import patch

from megatron.core.optimizer import clip_grads

from swift_megatron_grpo.cli.check_layouts import ranks
from swift_megatron_grpo.training.upstream_fixes import tensor_parallel_marks
from tests.unit.training.upstream_fixes.newer_transformer_engine import experts_unmarked, found_by_megatron


def run_layout(name: str, flags: list[str], batches: list[str], folder: str, fixed: bool) -> None:
    """Run a layout as with Transformer Engine 2.14: it clips by a tensor, and experts are marked by this package only.

    Without `fixed`, this package leaves experts as they are too.
    """
    no_experts = patch.object(tensor_parallel_marks, "TEGroupedLinear", ())
    with experts_unmarked(), patch.multiple(clip_grads, **found_by_megatron()):
        if fixed:
            ranks.run_layout(name, flags, batches, folder)
        else:
            with no_experts:
                ranks.run_layout(name, flags, batches, folder)
