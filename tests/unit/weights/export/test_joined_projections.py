"""Matrices that a checkpoint has as one are exported as one, adapters and their target modules as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mcore_bridge.utils.safetensors import LazyTensor
from safetensors.torch import save_file

from swift_megatron_grpo.weights.export.joined_projections import keep_joined

GATE, UP, DOWN, A, B = (torch.full((2, 3), float(value)) for value in range(5))


class Bridge:
    """Exports as mcore-bridge does."""

    def __init__(self, names: str) -> None:
        self._peft_target_modules: set[str] = {"up_proj"} if names == "after a tower" else set()

    def _set_mlp_state(self, layer: Any, tensors: Any, prefix: str, number: int, to_mcore: bool, **options: Any) -> Any:
        if to_mcore:
            return tensors or {"gate": 1, "up": 2, "down": 3}
        if layer == "adapter":
            self._peft_target_modules |= {"gate_proj", "up_proj", "down_proj"}
            halves = {"gate_proj.lora_A.weight": A, "up_proj.lora_A.weight": A,
                      "gate_proj.lora_B.weight": GATE, "up_proj.lora_B.weight": UP}  # fmt: skip
            return {f"{prefix}{name}": tensor for name, tensor in halves.items()}
        parts = {"gate_proj.weight": GATE, "up_proj.weight": UP, "down_proj.weight": DOWN}
        return {f"{prefix}{name}": tensor for name, tensor in parts.items()}


def bridge_for(folder: Path, name: str, stored: str = "") -> Bridge:
    save_file({f"model.layers.0.mlp.{name}.weight": torch.zeros(1)}, folder / "model.safetensors")
    bridge = Bridge(stored)
    keep_joined(bridge, folder)
    return bridge


def test_joined_matrices_are_exported_as_one(tmp_path: Path) -> None:
    bridge = bridge_for(tmp_path, "gate_up_proj")
    exported = bridge._set_mlp_state("layer", {}, "mlp.", 0, False)
    assert list(exported) == ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    assert torch.equal(exported["mlp.gate_up_proj.weight"], torch.cat([GATE, UP]))
    assert len(bridge._set_mlp_state("layer", {}, "experts.", 0, False, ep_rank=0)) == 3  # experts are others
    assert len(bridge._set_mlp_state("layer", {}, "mlp.", 0, True)) == 3  # reads


def test_an_adapter_is_one_for_both_and_names_its_module(tmp_path: Path) -> None:
    bridge = bridge_for(tmp_path, "gate_up_proj")
    exported = bridge._set_mlp_state("adapter", {}, "", 0, False)
    assert list(exported) == ["gate_up_proj.lora_A.weight", "gate_up_proj.lora_B.weight"]
    assert exported["gate_up_proj.lora_A.weight"] is A
    assert torch.equal(exported["gate_up_proj.lora_B.weight"], torch.cat([GATE, UP]))
    assert bridge._peft_target_modules == {"gate_up_proj", "down_proj"}
    after_tower = bridge_for(tmp_path, "gate_up_proj", "after a tower")
    after_tower._set_mlp_state("adapter", {}, "", 0, False)
    assert after_tower._peft_target_modules == {"up_proj", "gate_up_proj", "down_proj"}


def test_an_adapter_is_read_in_two_halves(tmp_path: Path) -> None:
    stored = {"mlp.gate_up_proj.lora_B.weight": LazyTensor(torch.cat([GATE, UP])), "mlp.down_proj.weight": DOWN}
    read = bridge_for(tmp_path, "gate_up_proj")._set_mlp_state("adapter", stored, "mlp.", 0, True)
    assert torch.equal(read["mlp.gate_up_proj.lora_B.weight"].load(), torch.stack([GATE, UP]))
    assert read["mlp.down_proj.weight"] is DOWN and len(read) == 2


def test_other_checkpoints_are_exported_as_upstream_does(tmp_path: Path) -> None:
    assert "_set_mlp_state" not in vars(bridge_for(tmp_path, "gate_proj"))
