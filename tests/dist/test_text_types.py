"""Text types match plain transformers, and one rank on other layouts, in fp32.

One process trains all types one after the other, because starting it takes longer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Task, base_flags, task
from tests.dist.conftest import DESCENT, LEARNING_RATE, Ranks, selected
from tests.dist.test_gradients import torch_weights
from tests.forking.client import run_script
from tests.paths import PROGRAMS
from tests.support.choice import rest_nightly
from tests.support.text_types import CONFIGS, WITH_EXPERTS

pytestmark = pytest.mark.dist
LAYOUTS = [*((kind, "tp2+sp") for kind in CONFIGS), *((kind, "dp2+ep2") for kind in WITH_EXPERTS)]
# Latent attention with a router's groups, attention sinks, part of the dimensions rotated, norms of each layer's heads.
CHOSEN = [("deepseek_v2", "dp2+ep2"), ("gpt_oss", "tp2+sp"), ("glm4", "tp2+sp"), ("minimax_m2", "tp2+sp")]
_PROGRAM = "tests.programs.dist.text_types"


@pytest.fixture(scope="module")
def types(ranks: Ranks, request: pytest.FixtureRequest) -> Path:
    """Run the selected types in the selected layouts and on one rank; return the folder with the model of each type."""
    folder = ranks.folder / "types"
    folder.mkdir()
    layouts: list[tuple[str, str]] = selected(request, "kind", "layout")
    kinds = [kind for kind in CONFIGS if (kind,) in selected(request, "kind") or kind in dict(layouts)]
    ranks.run("types", 1, [task(f"{_PROGRAM}:make_models", folder=str(folder), types=kinds)])
    ranks.run("types on one rank", 1, [_run(folder, kind, "one") for kind in kinds])
    if layouts:
        ranks.run("types on two ranks", 2, [_run(folder, kind, layout) for kind, layout in layouts])
    return folder


def _run(folder: Path, kind: str, layout: str) -> Task:
    results = folder / f"{kind}-runs"
    results.mkdir(exist_ok=True)
    backend = "unfused" if kind == "gpt_oss" else "flash"  # attention sinks
    flags = base_flags(str(folder / kind), str(results), "full", "float32", backend, DESCENT)
    return task(f"{_PROGRAM}:run_layout", name=layout, flags=flags, folder=str(results))


@pytest.fixture(scope="module")
def references(types: Path, request: pytest.FixtureRequest) -> Path:
    run_script(PROGRAMS / "dist" / "hf_gradients.py", types, "types", *(kind for (kind,) in selected(request, "kind")))
    return types


def _result(folder: Path, kind: str, layout: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / f"{kind}-runs" / f"{layout}.json").read_text())
    return result


def _gradients(folder: Path, kind: str, layout: str) -> dict[str, torch.Tensor]:
    start, moved = torch_weights(folder / kind), torch.load(folder / f"{kind}-runs" / f"{layout}.pt")
    assert start.keys() == moved.keys()
    return {name: (start[name].double() - moved[name].double()) / LEARNING_RATE for name in start}


def _largest(given: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """Return the largest difference of log-probs; a data-parallel rank has those of its own samples."""
    pairs = [pair for index, row in given.items() for pair in zip(row, expected[index], strict=True)]
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("kind", rest_nightly([*CONFIGS], [kind for kind, _ in CHOSEN]))
def test_a_text_type_matches_plain_transformers_in_fp64(references: Path, kind: str) -> None:
    run, reference = _result(references, kind, "one"), torch.load(references / f"{kind}.pt")
    expected = reference["grads"]
    norm = sum(grad.square().sum().item() for grad in expected.values()) ** 0.5
    of_samples = {str(index): row for index, row in enumerate(reference["logprobs"])}
    assert len(run["logprobs"]) == len(of_samples) and _largest(run["logprobs"], of_samples) < 2e-6
    assert run["loss"] == pytest.approx(reference["loss"], abs=1e-6)
    assert run["grad_norm"] == pytest.approx(norm, rel=1e-6)
    gradients = _gradients(references, kind, "one")
    for name in expected.keys() & gradients.keys():  # transformers has other names and one tensor of all experts
        error = (gradients[name] - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("kind", "layout"), rest_nightly(LAYOUTS, CHOSEN), ids=["-".join(case) for case in LAYOUTS])
def test_a_layout_of_a_text_type_matches_one_rank(types: Path, kind: str, layout: str) -> None:
    run, expected = _result(types, kind, layout), _result(types, kind, "one")
    assert _largest(run["logprobs"], expected["logprobs"]) < 2e-6
    assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    gradients, of_one = _gradients(types, kind, layout), _gradients(types, kind, "one")
    for name, gradient in gradients.items():
        assert (gradient - of_one[name]).norm() <= 1e-5 * of_one[name].norm(), name
