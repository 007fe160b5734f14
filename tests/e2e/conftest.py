"""What most of these tests train: a tiny model on a small dataset, of each file its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import make_dataset, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tmp_path_factory.mktemp(request.node.name.removeprefix("tests/e2e/").removesuffix(".py"))


@pytest.fixture(scope="module")
def dense(folder: Path) -> Path:
    return make_model(folder / "dense")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "data.jsonl")
