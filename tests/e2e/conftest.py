"""Fixtures of most of these tests: a tiny model and a small dataset, one copy per test file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.runs import make_dataset, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tmp_path_factory.mktemp(request.node.name.removeprefix("tests/e2e/").removesuffix(".py"))


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def dense(folder: Path, shared_model: Path) -> Path:
    return Path(shutil.copytree(shared_model, folder / "dense"))


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "data.jsonl")
