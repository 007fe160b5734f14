"""Deepstack features on the meta device are not added to prompts, and they are zero after a sleep."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from swift_megatron_grpo.generation.vllm import deepstack


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own class with the change, and of a model no more than the features: 4 tokens, 2 levels."""
    module = importlib.import_module(deepstack.MODULE)
    kind = module.Qwen3OmniMoeThinkerForConditionalGeneration
    monkeypatch.setattr(kind, "_get_deepstack_input_embeds", kind._get_deepstack_input_embeds)  # restores it
    deepstack.install_in(module)
    model = kind.__new__(kind)
    model.__dict__["deepstack_num_level"] = 2
    return model


def test_features_on_the_meta_device_are_left_out(model: Any) -> None:
    model.__dict__["deepstack_input_embeds"] = [torch.zeros(4, 8, device="meta") for _ in range(2)]
    assert model._get_deepstack_input_embeds(3) is None


def test_features_of_a_tower_reach_the_decoder(model: Any) -> None:
    model.__dict__["deepstack_input_embeds"] = [torch.full((4, 8), float(level)) for level in range(2)]
    found = model._get_deepstack_input_embeds(3)
    for level in range(2):
        assert torch.equal(found[f"deepstack_input_embeds_{level}"], torch.full((3, 8), float(level)))


def test_a_model_without_features_has_none(model: Any) -> None:
    assert model._get_deepstack_input_embeds(3) is None


def test_they_are_zero_after_a_wake_up(model: Any) -> None:
    model.__dict__["deepstack_input_embeds"] = levels = [torch.full((4, 8), torch.nan) for _ in range(2)]
    deepstack.clear_features(model)
    assert not any(level.any() for level in levels)
    assert model.__dict__["deepstack_input_embeds"] is levels  # CUDA graphs have their addresses


@pytest.mark.parametrize("absent", [{}, {"deepstack_input_embeds": None}])
def test_a_model_without_them_wakes_up(absent: dict[str, None]) -> None:
    model = torch.nn.Linear(2, 2)
    vars(model).update(absent)
    before = model.weight.clone()
    deepstack.clear_features(model)
    assert torch.equal(model.weight, before)


def test_gpus_still_have_a_vllm_that_needs_it() -> None:
    """vLLM 0.32 does not: remove deepstack.py when the extra gpu has left 0.25.1."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    vllm = next(one for one in map(Requirement, project["optional-dependencies"]["gpu"]) if one.name == "vllm")
    assert vllm.specifier.contains("0.25.1")
