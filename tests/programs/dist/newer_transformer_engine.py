"""Layouts with what newer versions of Transformer Engine do differently; tests/dist/conftest.py starts the ranks."""

from __future__ import annotations

from unittest.mock import patch

import torch
from megatron.core.optimizer import clip_grads

from swift_megatron_grpo.cli.check_layouts import ranks
from swift_megatron_grpo.trainer import grpo_trainer
from swift_megatron_grpo.training.upstream_fixes import marks
from tests.unit.training.upstream_fixes.newer_transformer_engine import experts_unmarked, found_by_megatron


def run_layout(name: str, flags: list[str], batches: list[str], folder: str, fixed: bool) -> None:
    """Run a layout as with Transformer Engine 2.14: it clips by a tensor, and experts are marked by this package only.

    Without `fixed`, this package leaves experts as they are too.
    """
    mark = marks.mark_sharded_parameters

    def mark_others(models: list[torch.nn.Module]) -> None:
        with patch.object(marks, "TEGroupedLinear", ()):
            mark(models)

    with experts_unmarked(), patch.multiple(clip_grads, **found_by_megatron()):
        if fixed:
            ranks.run_layout(name, flags, batches, folder)
        else:
            with patch.object(grpo_trainer, "mark_sharded_parameters", mark_others):
                ranks.run_layout(name, flags, batches, folder)
