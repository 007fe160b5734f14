"""One step of a mixture of experts, with the number of sorts of tokens by expert."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.moe import token_dispatcher

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.training.layers import fast_kernels
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str], skip: bool) -> None:
    """Run the step; `skip`: do not sort tokens that arrive sorted."""
    original, sorts = token_dispatcher.sort_chunks_by_idxs, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sorts
        sorts += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "sort_chunks_by_idxs", counted)
        if not skip:
            patch.setattr(fast_kernels, "skip_sorting", lambda model: None)
        trainer = make_trainer(flags)
        samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
        metrics = trainer.build_engine().train_step(samples, make_loss())
    [model] = trainer.unwrapped_models
    sums = {name: weight.double().sum().item() for name, weight in model.named_parameters()}
    write_report(out, {"sorts": sorts, "metrics": [metrics["loss"], metrics["grad_norm"]], "weights": sums})
