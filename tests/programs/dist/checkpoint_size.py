"""Estimate the bytes of a checkpoint, and count the weights that an export sends."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def main(out: str, flags: list[str]) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.settings.config import SavedParts
    from swift_megatron_grpo.training.trained_weights import saved_bytes

    trainer = MegatronRLHF(flags).prepare_trainer()
    adapter_only = trainer.args.has_adapter
    exported = trainer.bridge.export_weights(trainer.unwrapped_models, peft_format=adapter_only)
    weights = sum(tensor.numel() for _, tensor in exported)
    parts = {
        "weights": SavedParts(adapter_only, copies=1, merged_copies=0, whole_models=0, optimizer_bytes=0),
        "all": SavedParts(adapter_only, copies=2, merged_copies=0, whole_models=0, optimizer_bytes=12),
        "merged": SavedParts(adapter_only, copies=0, merged_copies=1, whole_models=0, optimizer_bytes=0),
        "kept": SavedParts(adapter_only, copies=0, merged_copies=0, whole_models=2, optimizer_bytes=0),
    }
    shares = {name: saved_bytes(trainer.unwrapped_models, saved, kept_bytes=100) for name, saved in parts.items()}
    report = {"weights": weights, "shares": shares}
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
