"""Every test process is one in which megatron can be imported, whether or not the machine has a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy machine is not a fault
settings.load_profile("patient")

if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate

    activate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", choices=("yes", "no"), help="only tests that are marked `alone`, or only those that are not"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if asked := config.getoption("--alone"):
        found: dict[str, list[pytest.Item]] = {"yes": [], "no": []}
        for item in items:
            found["yes" if item.get_closest_marker("alone") else "no"].append(item)
        items[:] = found.pop(asked)
        [others] = found.values()
        config.hook.pytest_deselected(items=others)
