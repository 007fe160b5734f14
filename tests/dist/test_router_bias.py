"""The expert bias of a sigmoid-scored router moves only if --megatron_extra_kwargs sets its rate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.conftest import Ranks

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def with_expert_bias(ranks: Ranks) -> Path:
    """Return a copy of the tiny mixture of experts with the tensors of such a bias."""
    folder = ranks.folder / "biased-model"
    if not folder.exists():
        tensors = load_file(ranks.model("moe") / "model.safetensors")
        gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
        for name in gates:
            tensors[name.replace("gate.weight", "gate.e_score_correction_bias")] = torch.tensor([0.5, 0.25, 0.0, -0.5])
        shutil.copytree(ranks.model("moe"), folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def one_step(ranks: Ranks, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = str(with_expert_bias(ranks))
    extra = ["--lr", "1e-30", "--model", model, "--megatron_extra_kwargs", json.dumps(settings)]
    ranks.call(name, "router_bias:main", 1, ranks.flags("moe", "full", "float32", extra))
    return ranks.report(name, 0)


@pytest.mark.dist
def test_the_bias_stays_that_of_the_checkpoint_by_default(ranks: Ranks) -> None:
    report = one_step(ranks, "bias-default", SIGMOID)
    assert len(report["before"]) == 4 and all(b == [0.5, 0.25, 0.0, -0.5] for b in report["before"].values())
    assert report["after"] == report["before"]


@pytest.mark.dist
def test_a_rate_that_the_user_sets_is_honoured(ranks: Ranks) -> None:
    report = one_step(ranks, "bias-moving", SIGMOID | {"moe_router_bias_update_rate": 1e-3})
    for name, before in report["before"].items():
        moved = [abs(a - b) for a, b in zip(report["after"][name], before, strict=True)]
        assert max(moved) == pytest.approx(1e-3, rel=1e-3)
