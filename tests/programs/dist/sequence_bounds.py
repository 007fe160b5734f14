"""One step of a model with gated delta nets, with the number of tensors of bounds that their kernels get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mcore_bridge.model.modules import gated_delta_net

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.training.upstream_fixes import linear_attention
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str], unread: bool) -> None:
    """Run the step; `unread`: with the correction."""
    rule, seen = gated_delta_net.chunk_gated_delta_rule, list[torch.Tensor]()

    def watched(*args: Any, cu_seqlens: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(cu_seqlens)
        return rule(*args, cu_seqlens=cu_seqlens, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_delta_net, "chunk_gated_delta_rule", watched)
        if not unread:
            patch.setattr(linear_attention, "leave_bounds_unread", lambda models: None)
        trainer = make_trainer(flags)
        engine = trainer.build_engine()
        samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
        micro_batches = engine.passes.plan(samples).num_micro_batches
        metrics = engine.train_step(samples, make_loss())
    report = {
        "bounds": len({id(tensor) for tensor in seen}),
        "calls": len(seen),
        "micro batches": micro_batches,
        "metrics": [metrics["loss"], metrics["grad_norm"]],
    }
    write_report(out, report)
