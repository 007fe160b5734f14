"""Exports the first two matrices of a feed-forward as one tensor if the checkpoint has them so (GLM-4, GLM-4V).

mcore-bridge 1.6.5 reads `gate_up_proj`, and exports `gate_proj` and `up_proj` for every layer without experts. vLLM
accepts both. A model saved with the latter names loads in transformers with feed-forwards of random weights, and its
adapter is for modules that the model does not have. It cuts an adapter that it reads over tensor-parallel ranks as one
matrix, so that the first half of the ranks gets gate_proj alone; at TP 2 that was 5 to 10 % of the gradient norm.

Tests: tests/contract/test_images_seam.py fails once upstream exports what it has read; then delete this file.
tests/e2e/test_images.py and test_image_layouts.py[glm4v-lora] fail without it.
"""

from pathlib import Path
from typing import Any

import torch
from mcore_bridge.utils.safetensors import LazyTensor

from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_GATE = "gate_proj"
_UP = "up_proj"
_JOINED = "gate_up_proj"


def keep_joined(bridge: Any, source: str | Path) -> None:
    """Make the bridge export these matrices, and read their adapters, as the checkpoint in `source` has them."""
    if not any(name.endswith(f".mlp.{_JOINED}.weight") for name in stored_tensors(source)):
        return
    convert = bridge._set_mlp_state

    def convert_joined(
        layer: Any, tensors: Any, prefix: str, number: int, to_mcore: bool, ep_rank: int | None = None, **options: Any
    ) -> Any:
        targets = bridge._peft_target_modules
        of_others = {*targets}  # an image part may have modules of the same names
        if ep_rank is not None or to_mcore:
            given = halved(tensors, prefix) if ep_rank is None else tensors
            return convert(layer, given, prefix, number, to_mcore, ep_rank=ep_rank, **options)
        converted = convert(layer, tensors, prefix, number, to_mcore, **options)
        added = {_GATE, _UP} & targets - of_others
        targets -= added
        targets |= {_JOINED} if added else set()
        return joined(converted)

    bridge._set_mlp_state = convert_joined


def halved(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors with lora_B in two halves, [2, channels, rank], because every rank reads its part of each."""
    name = f"{prefix}{_JOINED}.lora_B.weight"
    if name not in tensors:
        return tensors
    stored = tensors[name]
    return {**tensors, name: LazyTensor(loader=lambda: stored.load().unflatten(0, (2, -1)))}


def joined(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of a feed-forward with the rows of gate_proj above those of up_proj. Both halves share lora_A."""
    result = {}
    for name, tensor in tensors.items():
        first, is_gate, rest = name.partition(f"{_GATE}.")
        if is_gate:
            below = tensors[f"{first}{_UP}.{rest}"]
            together = tensor if rest.startswith("lora_A") else torch.cat([tensor, below])
            result[f"{first}{_JOINED}.{rest}"] = together
        elif f"{_UP}." not in name:
            result[name] = tensor
    return result
