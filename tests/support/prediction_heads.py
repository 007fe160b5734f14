"""Tiny models whose layer of multi-token prediction drafts what the model is likely to sample."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INTO_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")  # outputs of a layer's parts


def make_predictable(model: Path, influence: float = 0.1) -> None:
    """Let a token decide mostly on the next one, and the layer of multi-token prediction draft that one.

    A model whose layers add nothing predicts from the last token alone. Here they add little, and the layer of
    multi-token prediction is one that adds nothing. So it is wrong where the states of the layers decide.
    """
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(_INTO_STREAM) and ".visual." not in name:
            tensor *= 0 if name.startswith("mtp.") else influence
    hidden = tensors["mtp.norm.weight"].shape[0]
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).to(torch.bfloat16)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    [norm] = [name for name in tensors if name in ("model.language_model.norm.weight", "model.norm.weight")]
    tensors["mtp.norm.weight"] = tensors[norm].clone()
    save_file(tensors, file, metadata={"format": "pt"})
