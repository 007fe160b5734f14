"""A checkpoint with tensors that no rank loads is refused by their names, and so is one that lacks a tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.conftest import Ranks

Tensors = dict[str, torch.Tensor]
HARMLESS = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.4.eh_proj.weight", "mtp.layers.0.norm.weight"]
BIAS = "model.layers.3.self_attn.o_proj.bias"


def build(ranks: Ranks, name: str, change: Callable[[Tensors], object], extra: list[str], size: int = 1) -> list[str]:
    """Return the error of every rank that loads the changed checkpoint; the second stage has the last two layers."""
    folder = ranks.folder / f"{name}-model"
    shutil.copytree(ranks.model("dense"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    flags = ranks.flags("dense", "full", "float32", ["--model", str(folder), *extra])
    ranks.call(name, "broken_models:build", size, flags)
    return [ranks.report(name, rank)["error"] for rank in range(size)]


def add(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(2) for name in names})


def rename(before: str, after: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({after: tensors.pop(before)})


@pytest.mark.dist
def test_a_tensor_that_no_rank_loads_is_named_on_every_rank(ranks: Ranks) -> None:
    pipeline = ["--pipeline_model_parallel_size", "2"]
    for error in build(ranks, "extra", add(BIAS, "score.weight", *HARMLESS), pipeline, size=2):
        assert error.startswith("ValueError: 2 tensors of ")
        assert f"neither trained nor sent to vLLM: {BIAS}, score.weight; correct their names" in error


@pytest.mark.dist
def test_tensors_may_be_left_out_on_request(ranks: Ranks) -> None:
    assert build(ranks, "warned", add(BIAS, *HARMLESS), ["--unread_tensors", "warn"]) == [""]


@pytest.mark.dist
def test_a_tensor_under_another_name_is_refused_with_its_right_name(ranks: Ranks) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    [error] = build(ranks, "renamed", rename(name, name.replace("q_norm", "query_norm")), [])
    assert "has no tensor whose name ends with q_norm.weight" in error
    assert "similar names that were not loaded: " in error
    assert "model.layers.1.self_attn.query_norm.weight" in error and "model.layers.2" not in error


@pytest.mark.dist
def test_an_adapter_without_weights_is_refused(ranks: Ranks) -> None:
    """A model without weights is refused before: tests/e2e/test_refusals.py."""
    folder = ranks.folder / "no-weights-adapter"
    shutil.copytree(ranks.adapter("dense"), folder)
    (folder / "adapter_model.safetensors").unlink()
    flags = ranks.flags("dense", "lora", "float32", ["--adapters", str(folder)])
    ranks.call("empty", "broken_models:build", 1, flags)
    assert f"{folder} has no weights: neither an index nor a file" in ranks.report("empty", 0)["error"]
