"""Prepare every test process: megatron can be imported with or without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from tests.forking.client import sockets_folder

settings.register_profile("patient", deadline=None)  # a test may be slow because the machine is busy
settings.load_profile("patient")

if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate

    activate()


def pytest_configure() -> None:
    sockets_folder()  # before xdist starts its workers, which then share the fork servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", choices=("yes", "no"), help="run only tests that are marked `alone`, or only the others"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if choice := config.getoption("--alone"):
        groups: dict[str, list[pytest.Item]] = {"yes": [], "no": []}
        for item in items:
            groups["yes" if item.get_closest_marker("alone") else "no"].append(item)
        items[:] = groups.pop(choice)
        [others] = groups.values()
        config.hook.pytest_deselected(items=others)
