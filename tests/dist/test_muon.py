"""Muon: every layout updates as one rank, and what leaves the GPU comes back bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swift_megatron_grpo.cli.check.model import read_model
from swift_megatron_grpo.cli.check_layouts.layouts import Variant, task
from swift_megatron_grpo.cli.estimate.activations import Tokens
from swift_megatron_grpo.cli.estimate.memory import Training, plan_memory
from swift_megatron_grpo.settings.layout import Layout
from tests.dist.conftest import RUN_LAYOUT, Ranks
from tests.support.muon import MUON, needs_muon

pytestmark = [pytest.mark.dist, needs_muon]
LAYOUTS = {
    ("dense", "full"): ["dp2", "tp2+sp", "pp2"],
    ("dense", "lora"): ["dp2", "tp2+sp", "pp2"],
    ("moe", "full"): ["dp2+ep2", "tp2+sp", "tp2+sp+etp2"],
}


def layout(ranks: Ranks, kind: str, tuner: str, name: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return metrics of three steps, and the weights after them."""
    folder = ranks.folder / f"muon-{kind}-{tuner}"
    folder.mkdir(exist_ok=True)
    flags = [*ranks.layout_flags(kind, tuner), *MUON, "--lr", "1e-2"]
    run = task(RUN_LAYOUT, name=name, flags=flags, batches=["off-policy", "plain", "plain"], folder=str(folder))
    ranks.run(f"muon-{kind}-{tuner}-{name}", Variant.parse(name).ranks, [run])
    return json.loads((folder / f"{name}.json").read_text())["metrics"], torch.load(folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("kind", "tuner", "name"), [(*case, name) for case, names in LAYOUTS.items() for name in names]
)
def test_updates_are_those_of_one_rank(ranks: Ranks, kind: str, tuner: str, name: str) -> None:
    expected, weights = layout(ranks, kind, tuner, "one")
    found, others = layout(ranks, kind, tuner, name)
    for step, wanted in zip(found, expected, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert max((others[key].float() - weights[key].float()).abs().max() for key in weights) < 3e-6


def test_matrices_move_by_their_spectral_norm_and_the_rest_by_adam(ranks: Ranks) -> None:
    """Every singular value of a matrix's update is about the same; a shard of it would have others."""
    before = load_file(ranks.model("dense") / "model.safetensors")
    _, after = layout(ranks, "dense", "full", "one")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        values = torch.linalg.svdvals(after[name].double() - before[name].double())
        assert values.min() > 0.1 * values.max()  # of a gradient, the smallest is far below
    embedding = after["model.embed_tokens.weight"].double() - before["model.embed_tokens.weight"].double()
    assert embedding.abs().max() < 3.1e-2  # Adam: three steps of --lr at most


def test_states_that_left_the_gpu_come_back_bit_for_bit(ranks: Ranks) -> None:
    flags = ranks.flags("dense-shallow", "full", "bfloat16", ["--beta", "0.1", *MUON])
    ranks.call("offload-muon", "offloading:main", 2, flags)
    report = ranks.report("offload-muon", 0)
    assert report["metrics_equal"] == [True] * 5 and report["weights_differ"] == []
    assert report["trained"]
    model = read_model(ranks.model("dense-shallow"))
    muon = Training(Layout(2), Tokens(64, 64, 32), 1, optimizer_bytes=12, matrix_bytes=8, shards_optimizer=False)
    [planned] = plan_memory(model.tensors, model.decoder, muon, None, 1e9)
    assert report["groups"]["optimizer state"] == pytest.approx(planned.optimizer, rel=0.02)  # step counts, padding
