"""The simulation of many ranks computes what docs/scaling.md shows."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulate_scaling import WEIGHTS, simulate, table
from tests.paths import REPOSITORY

RESULT = REPOSITORY / "docs" / "scaling.json"


def test_the_page_shows_the_committed_numbers() -> None:
    assert table(json.loads(RESULT.read_text())["rows"]) in (REPOSITORY / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_exact_is_computed_again(index: int) -> None:
    committed = json.loads(RESULT.read_text())["rows"][index]
    found = simulate(committed["ranks"])
    for name in ("completions", "micro_batches", "balance", "fill", "train_seconds", "gradient_bytes"):
        assert found[name] == pytest.approx(committed[name]), name
    for name in ("everything_bytes", "outline_bytes", "body_bytes"):
        assert found[name] == pytest.approx(committed[name], rel=0.01), name


def test_weights_are_those_of_qwen3_8b() -> None:
    assert pytest.approx(8.19e9, rel=0.001) == WEIGHTS
