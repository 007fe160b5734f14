"""Tiny models whose layer of multi-token prediction drafts what the model is likely to sample."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

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


class PlainHead(torch.nn.Module):
    """The layer of multi-token prediction of a dense Qwen3.5, of parts of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = copy(config)
        config.layer_types = ["full_attention"]
        hidden = config.hidden_size
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        norms = (Qwen3_5RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Return what the output layer reads. `hidden`: [b, t, h] of tokens; `embedded`: of the tokens behind them."""
        states = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        sequences, tokens, _ = states.shape
        angles = rotary(states, torch.arange(tokens).expand(3, sequences, tokens))
        mask = torch.full((tokens, tokens), -torch.inf, dtype=states.dtype).triu(1)
        return self.norm(self.layers[0](states, position_embeddings=angles, attention_mask=mask[None, None]))

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load from the tensors of a checkpoint."""
        prefix = "mtp."
        self.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
