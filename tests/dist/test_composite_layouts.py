"""Composite models, linear and latent attention match one rank on every layout, in fp32, and plain transformers.

Gradient norms of most of these models are 10 to 20, with terms that cancel, so they are compared to 1e-5.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.arguments.refused import OMNI, ON_TEXT_ALONE
from swift_megatron_grpo.cli.check_layouts.command import compare
from tests.dist.conftest import LEARNING_RATE, Ranks, selected, selected_layouts
from tests.dist.test_gradients import torch_weights
from tests.forking.client import run_script
from tests.paths import PROGRAMS
from tests.support.choice import covering, rest_nightly

pytestmark = pytest.mark.dist
LAYOUTS = {
    ("qwen3_5", "full"): ["tokens64", "tp2", "tp2+sp+recompute", "pp2+vpp2", "cp2", "dp2"],
    ("qwen3_5", "lora"): ["mbs1", "tp2+sp", "pp2"],
    ("qwen3_5-tied", "full"): ["pp2", "dp2+overlap"],
    ("qwen3_5_moe", "full"): ["tp2+sp", "dp2+ep2", "tp2+sp+etp2"],
    ("qwen3_5_moe", "lora"): ["tp2+sp"],
    ("qwen3_next", "full"): ["tp2+sp"],
    ("deepseek", "full"): ["tokens64", "tp2+sp+recompute", "pp2", "cp2", "dp2+ep2"],
    ("deepseek", "lora"): ["tp2+sp"],
    ("qwen3_omni_moe", "full"): ["tp2+sp", "pp2", "dp2+ep2", "cp2"],
    ("qwen3_omni_moe", "lora"): ["tp2+sp"],
    ("qwen2_5_omni", "full"): ["tp2+sp", "cp2"],
    ("minicpmv4_6", "full"): ["tp2+sp", "pp2"],
    ("qwen3_vl", "full"): ["tp2+sp"],  # test_image_layouts.py has more of the types with images
}
KINDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen2_5_vl", "deepseek", *OMNI, *ON_TEXT_ALONE]
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]
CHOSEN = ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe", "deepseek", "qwen3_omni_moe"]
MARKED = rest_nightly(CASES, covering([case for case in CASES if case[0] in CHOSEN]))


@pytest.fixture(scope="module")
def finished(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    ranks.all_layouts("composite", selected_layouts(request))
    return ranks


@pytest.mark.parametrize(("kind", "tuner", "layout"), MARKED, ids=["-".join(case) for case in CASES])
def test_a_layout_matches_one_rank(finished: Ranks, kind: str, tuner: str, layout: str) -> None:
    difference = compare(layout, str(finished.folder / f"{kind}-{tuner}"))
    bound = 1e-6 if kind in OMNI else 1e-5
    assert difference.loss <= 1e-6 and difference.grad_norm <= bound and difference.weights <= 1e-6, difference


@pytest.fixture(scope="module")
def descended(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    ranks.descents("composite descents", [kind for (kind,) in selected(request, "kind")])
    return ranks


@pytest.mark.parametrize("kind", rest_nightly(KINDS, [kind for kind in KINDS if kind in CHOSEN]))
def test_gradients_match_plain_transformers(descended: Ranks, tmp_path: Path, kind: str) -> None:
    """In transformers in fp64, but for the decay of delta nets and some norms, which it computes in fp32."""
    run = json.loads((descended.descent(kind) / "one.json").read_text())
    run_script(PROGRAMS / "dist" / "hf_gradients.py", descended.model(kind), tmp_path / "hf.pt")
    reference = torch.load(tmp_path / "hf.pt")
    squares = sum(grad.square().sum().item() for grad in reference["grads"].values())
    assert run["metrics"][0]["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    bounds = dict.fromkeys((*OMNI, *ON_TEXT_ALONE), 1e-6) | {"qwen3_next": 2e-5}
    assert run["metrics"][0]["grad_norm"] == pytest.approx(squares**0.5, rel=bounds.get(kind, 1e-5))

    start, moved = torch_weights(descended.model(kind)), torch.load(run["weights"])
    compared = [name for name in reference["grads"] if name in start and name in moved]
    assert len(compared) > len(reference["grads"]) / 3 or kind.startswith("qwen2")  # released under older names
    for name in compared:
        gradient, expected = (start[name].double() - moved[name].double()) / LEARNING_RATE, reference["grads"][name]
        if gradient.shape != expected.shape:  # experts of Qwen3-VL, which are released transposed
            gradient = gradient.mT
        assert (gradient - expected).norm() / expected.norm() < 1e-4, name
