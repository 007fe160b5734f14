"""A layer of multi-token prediction learns with the policy: the right gradient, and no trace in the policy."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swift_megatron_grpo.cli.check_layouts.layouts import Variant, task
from tests.dist.conftest import DESCENT, LEARNING_RATE, LEARNS, RUN_LAYOUT, Ranks
from tests.dist.test_gradients import torch_weights
from tests.forking.client import run_script
from tests.paths import PROGRAMS
from tests.support.choice import rest_nightly

pytestmark = pytest.mark.dist
LAYOUTS = ["tokens64", "tp2+sp+recompute", "dp2+overlap_param", "tp2", "tp2+sp", "dp2", "dp2+tokens64"]
CASES = [(kind, layout) for kind in ("qwen3_5", "qwen3_5-tied") for layout in LAYOUTS]
CHOSEN = [("qwen3_5", "tokens64"), ("qwen3_5", "dp2+overlap_param"), ("qwen3_5-tied", "tp2+sp+recompute")]


def trained(ranks: Ranks, layout: str, extra: list[str], kind: str = "qwen3_5") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return metrics of two steps, and the weights after them."""
    name = f"{kind}-{'frozen' if LEARNS[0] not in extra else 'learning'}-{len(extra)}"
    folder = ranks.folder / name
    folder.mkdir(exist_ok=True)
    flags = [*ranks.flags(kind, "full", "float32"), *extra]
    batches = ["given"] if "sgd" in extra else ["on-policy", "off-policy"]
    run = task(RUN_LAYOUT, name=layout, flags=flags, batches=batches, folder=str(folder))
    ranks.run(f"{name}-{layout}", Variant.parse(layout).ranks, [run])
    return json.loads((folder / f"{layout}.json").read_text())["metrics"], torch.load(folder / f"{layout}.pt")


@pytest.mark.parametrize(("kind", "layout"), rest_nightly(CASES, CHOSEN))
def test_the_policy_is_that_of_a_run_without_it(ranks: Ranks, kind: str, layout: str) -> None:
    """Metrics and weights to the bit, while clipping by the norm is active. The layer's own are those of one rank."""
    plain, weights = trained(ranks, layout, [], kind)
    metrics, both = trained(ranks, layout, LEARNS, kind)
    losses = [step.pop("drafts/loss") for step in metrics]
    assert metrics == plain and all(step["grad_norm"] > 0.05 for step in plain)
    assert all(torch.equal(both[name], weight) for name, weight in weights.items())
    layer = both.keys() - weights.keys()
    assert len(layer) == 15 and all(name.startswith("mtp.") for name in layer)
    one, expected = trained(ranks, "one", LEARNS, kind)
    assert losses == pytest.approx([step["drafts/loss"] for step in one], rel=1e-6)
    # Rows of the tiny model's mtp.fc.weight are nearly equal, so its gradient is what is left of sums that cancel. Two
    # steps move a weight by up to 2e-3.
    bounds = dict.fromkeys(layer, 1e-6) | {"mtp.fc.weight": 1e-5}
    assert all((both[name] - expected[name]).abs().max() < bound for name, bound in bounds.items())


@pytest.mark.parametrize("layout", ["one", "tp2+sp", pytest.param("dp2", marks=pytest.mark.nightly)])
def test_its_gradient_is_that_of_plain_transformers_in_fp64(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    model = with_drawn_projection(ranks)
    [metrics], moved = trained(ranks, layout, [*LEARNS, *DESCENT], "qwen3_5-drawn")
    run_script(PROGRAMS / "dist" / "hf_draft_head.py", model, tmp_path / "hf.pt")
    reference = torch.load(tmp_path / "hf.pt")
    start = torch_weights(model)
    assert metrics["drafts/loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert len(reference["grads"]) == 15
    for name, expected in reference["grads"].items():
        gradient = (start[name].double() - moved[name].double()) / LEARNING_RATE
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


def test_a_step_without_trained_tokens_has_no_loss(ranks: Ranks) -> None:
    ranks.engine("draft-head-no-tokens", "no_tokens", 1, LEARNS, kind="qwen3_5")
    assert ranks.report("draft-head-no-tokens", 0)["drafts/loss"] == 0


def with_drawn_projection(ranks: Ranks) -> Path:
    """Return a model whose projection is not a constant, with which rounding would be a large part of gradients."""
    source, model = ranks.model("qwen3_5"), ranks.folder / "qwen3_5-drawn-model"
    if not model.exists():
        tensors = torch_weights(source)
        drawn = torch.randn(tensors["mtp.fc.weight"].shape, generator=torch.Generator().manual_seed(0))
        copytree(source, model)
        save_file(tensors | {"mtp.fc.weight": 0.1 * drawn.bfloat16()}, model / "model.safetensors", {"format": "pt"})
    return model
