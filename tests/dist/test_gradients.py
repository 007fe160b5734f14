"""Gradients of the whole model match an fp64 reference written with plain transformers and autograd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.dist.conftest import LEARNING_RATE, Ranks
from tests.forking.client import run_script
from tests.paths import PROGRAMS


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "prompts"), [("one", ""), ("mbs4+shared", "one_prompt")])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_gradients_match_plain_transformers_in_fp64(
    ranks: Ranks, tmp_path: Path, kind: str, layout: str, prompts: str
) -> None:
    model = ranks.model(kind)
    run = json.loads((ranks.descent(kind) / f"{layout}.json").read_text())
    moved = torch.load(run["weights"])
    run_script(PROGRAMS / "dist" / "hf_gradients.py", model, tmp_path / "hf.pt", prompts)
    reference = torch.load(tmp_path / "hf.pt")
    start = {name: tensor.double() for name, tensor in torch_weights(model).items()}

    assert run["metrics"][0]["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    squares = 0.0
    for name, expected in checkpoint_names(reference["grads"], start).items():
        gradient = (start[name] - moved[name].double()) / LEARNING_RATE
        error = (gradient - expected).norm()
        assert error <= 1e-5 * expected.norm(), f"{name}: {error:.1e}"  # an expert without tokens has no gradient
        squares += expected.square().sum().item()
    assert run["metrics"][0]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)


def torch_weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def checkpoint_names(grads: dict[str, torch.Tensor], names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split the tensors of transformers, which hold all experts of a layer, into the checkpoint's one per expert."""
    split: dict[str, torch.Tensor] = {}
    for name, grad in grads.items():
        if name in names:
            split[name] = grad
            continue
        prefix, _, kind = name.rpartition(".")  # model.layers.0.mlp.experts.gate_up_proj: [experts, 2 * ffn, hidden]
        for expert, part in enumerate(grad):
            if kind == "down_proj":
                split[f"{prefix}.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                split[f"{prefix}.{expert}.gate_proj.weight"], split[f"{prefix}.{expert}.up_proj.weight"] = gate, up
    assert set(split) == set(names)
    return split
