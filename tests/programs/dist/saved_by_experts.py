"""Bytes that a layer of experts saves for backward, in one step of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str]) -> None:
    """Train a step; report tokens, rows and saved storages of every pass through a layer of experts on this rank."""
    trainer = make_trainer(flags)
    weights = {
        tensor.untyped_storage().data_ptr()
        for model in trainer.unwrapped_models
        for tensor in (*model.parameters(), *model.buffers())
    }
    passes: list[dict[str, Any]] = []
    original = MoELayer.forward

    def watched(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        saved: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # storages stay, or others get their addresses
        sorted_rows: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved.setdefault(storage.data_ptr(), (storage, tensor.detach()))
            return tensor

        handle = layer.experts.register_forward_pre_hook(lambda _, inputs: sorted_rows.append(len(inputs[0])))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = original(layer, hidden_states, *args, **kwargs)
        handle.remove()
        given = hidden_states.untyped_storage().data_ptr()
        passes.append(
            {
                "tokens": hidden_states.shape[:-1].numel(),
                "rows": sorted_rows[0],
                "saved": [
                    [list(tensor.shape), str(tensor.dtype), storage.nbytes()]
                    for pointer, (storage, tensor) in saved.items()
                    if pointer != given
                ],
            }
        )
        return output

    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoELayer, "forward", watched)
        engine.train_step(samples, make_loss())
    write_report(out, {"passes": passes})
