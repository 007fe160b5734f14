"""Tests here register agents; each leaves ms-swift's table of schedulers as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from swift.rollout import multi_turns


@pytest.fixture(autouse=True)
def known_agents() -> Iterator[None]:
    before = dict(multi_turns)
    yield
    multi_turns.clear()
    multi_turns.update(before)
