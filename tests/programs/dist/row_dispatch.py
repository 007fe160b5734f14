"""One step of a mixture of experts, with the rows that cross ranks, by Megatron's dispatcher and by this package's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.training.layers import fast_kernels
from swift_megatron_grpo.training.moe import row_dispatch
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str], once: bool, avoid: int = 0) -> None:
    """Run the step; `once`: send rows once. `avoid`: experts from the last one that no token goes to."""
    original, rows = token_dispatcher.all_to_all, list[int]()

    def counted(group: Any, tensor: torch.Tensor, received: Any, sent: Any, **more: Any) -> torch.Tensor:
        if sent is not None and tensor.dim() == 2 and tensor.shape[1] == hidden_size:
            own = torch.distributed.get_rank(group)
            rows.append(int(sum(count for rank, count in enumerate(sent) if rank != own)))
        result: torch.Tensor = original(group, tensor, received, sent, **more)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "all_to_all", counted)
        patch.setattr(row_dispatch, "all_to_all", counted)
        if not once:
            patch.setattr(fast_kernels, "send_rows_once", lambda model: None)
        trainer = make_trainer(flags)
        hidden_size = trainer.config.hidden_size
        [model] = trainer.unwrapped_models
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        for layer in layers if avoid else []:
            layer.router.gating = _without_last(layer.router.gating, avoid)
        samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
        metrics = trainer.build_engine().train_step(samples, make_loss())
    sums = {name: weight.double().sum().item() for name, weight in model.named_parameters()}
    write_report(
        out,
        {
            "rows": sum(rows),
            "dispatchers": sorted({type(layer.token_dispatcher).__name__ for layer in layers}),
            "metrics": metrics,
            "weights": sums,
        },
    )


def _without_last(gating: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    def logits(*args: Any) -> torch.Tensor:
        values = gating(*args)
        chosen = torch.arange(values.shape[-1]) < values.shape[-1] - count
        return values.masked_fill(~chosen, -100.0)

    return logits
