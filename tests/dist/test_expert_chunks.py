"""Tokens that arrive sorted by expert are not sorted again, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import task
from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist
TP2 = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
# By number of ranks: layouts whose tokens arrive sorted, and others. See also test_row_dispatch.py.
SORTED = {1: {"one": [], "one+permute": ["--moe_permute_fusion", "true"]}, 2: {"tp2+sp": TP2}}
UNSORTED = {2: {"tp2+sp+etp2": [*TP2, "--expert_tensor_parallel_size", "2"]}}


def steps(ranks: Ranks, number: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a step as it runs, and one in which all dispatchers sort; all layouts run in the same processes."""
    layouts = SORTED[number] | UNSORTED.get(number, {})
    tasks = [
        task(
            "tests.programs.dist.expert_chunks:main",
            out=str(ranks.folder / f"chunks-{layout}-{skip}"),
            flags=ranks.flags("moe-shallow", "full", "float32", flags),
            skip=skip,
        )
        for layout, flags in layouts.items()
        for skip in (True, False)
    ]
    ranks.run(f"chunks-{number}", number, tasks)
    return ranks.report(f"chunks-{name}-True", 0), ranks.report(f"chunks-{name}-False", 0)


@pytest.mark.parametrize(("number", "name"), [(number, name) for number in SORTED for name in SORTED[number]])
def test_sorted_tokens_are_not_sorted_again_and_the_step_has_the_same_bits(
    ranks: Ranks, number: int, name: str
) -> None:
    step, sorting = steps(ranks, number, name)
    assert step.pop("sorts") == 0 and sorting.pop("sorts") > 0
    assert step == sorting


@pytest.mark.parametrize(("number", "name"), [(number, name) for number in UNSORTED for name in UNSORTED[number]])
def test_tokens_of_several_ranks_are_sorted(ranks: Ranks, number: int, name: str) -> None:
    step, sorting = steps(ranks, number, name)
    assert step == sorting and step["sorts"] > 0
