"""The gated delta nets of a micro batch get one and the same tensor of bounds, and compute the same."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import task
from tests.dist.conftest import Ranks

LAYOUTS = {1: [], 2: ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]}
pytestmark = pytest.mark.dist


@pytest.mark.parametrize("number", LAYOUTS)
def test_all_layers_get_the_same_tensor_and_the_step_has_the_same_bits(ranks: Ranks, number: int) -> None:
    tasks = [
        task(
            "tests.programs.dist.sequence_bounds:main",
            out=str(ranks.folder / f"bounds-{number}-{unread}"),
            flags=ranks.flags("qwen3_5", "full", "float32", LAYOUTS[number]),
            unread=unread,
        )
        for unread in (True, False)
    ]
    ranks.run(f"bounds-{number}", number, tasks)
    for rank in range(number):
        passed_on, checked = (ranks.report(f"bounds-{number}-{unread}", rank) for unread in (True, False))
        assert passed_on["metrics"] == checked["metrics"] and passed_on["calls"] == checked["calls"]
        assert passed_on["bounds"] == passed_on["micro batches"] > 1
        assert checked["bounds"] == checked["calls"] > passed_on["bounds"]
