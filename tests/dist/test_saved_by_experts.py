"""A layer of experts saves what the memory plan counts for the rows that its rank receives, and no other row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import Task, Variant, task
from swift_megatron_grpo.cli.estimate.activations import Decoder, Recompute, Tokens, bytes_of_layers
from swift_megatron_grpo.settings.layout import Layout
from tests.dist.conftest import Ranks, selected

pytestmark = pytest.mark.dist
HIDDEN, FFN, TAKEN, ITEM = 64, 32, 2, 2  # of the tiny mixture; bf16
LAYOUTS = [
    ("one", "full"),
    ("one", "lora"),
    ("dp2", "lora"),
    ("dp2+ep2", "full"),
    ("dp2+ep2", "lora"),
    ("tp2+sp", "full"),
    ("tp2+sp+ep2", "full"),
    ("tp2+sp+etp2", "full"),
]
NARROW = 16  # bytes of a row or of a choice of experts: a tensor that has no more is not planned
TOKENS = 1024


def planned_of_a_row(layout: Layout) -> float:
    """Return the bytes that the plan has for a row of experts: those of a layer less those of one without experts."""
    without = Decoder(1, HIDDEN, HIDDEN, HIDDEN, 0, 256, False)
    experts = replace(without, expert_layers=frozenset([0]), expert_ffn=FFN, experts_per_token=TAKEN)
    tokens = Tokens(TOKENS, TOKENS, TOKENS)
    with_them, less = (bytes_of_layers(one, [0], tokens, layout, Recompute(), ITEM).kept for one in (experts, without))
    rows = TOKENS * TAKEN * layout.expert_tensor_parallel_size / layout.tensor_model_parallel_size
    return (with_them - less) / rows


@pytest.fixture(scope="module")
def finished(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """Run the selected layouts."""
    tasks: dict[int, list[Task]] = {}
    for name, tuner in selected(request, "name", "tuner"):
        layout = Variant.parse(name)
        out, flags = str(ranks.folder / f"saved-{name}-{tuner}"), ranks.flags("moe-shallow", tuner, "bfloat16")
        run = task("tests.programs.dist.saved_by_experts:main", out=out, flags=[*flags, *layout.flags()])
        tasks.setdefault(layout.ranks, []).append(run)
    ranks.run_each("saved", tasks)
    return ranks


def passes(finished: Ranks, name: str, tuner: str) -> list[list[dict[str, Any]]]:
    """Return the passes through layers of experts on each rank."""
    return [finished.report(f"saved-{name}-{tuner}", rank)["passes"] for rank in range(Variant.parse(name).ranks)]


@pytest.mark.parametrize(("name", "tuner"), LAYOUTS)
def test_saved_rows_of_experts_have_the_planned_bytes(finished: Ranks, name: str, tuner: str) -> None:
    sizes = Variant.parse(name).sizes
    layout = Layout(
        Variant.parse(name).ranks,
        tensor_model_parallel_size=sizes.get("tp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp", 1),
        sequence_parallel="tp" in sizes,
    )
    of_a_row = planned_of_a_row(layout)
    for of_rank in passes(finished, name, tuner):
        assert of_rank
        for one in of_rank:
            # Indices, probabilities, tables of the router and what is between two adapters are not planned.
            bound = NARROW * (one["rows"] + TAKEN * one["tokens"])
            wide = [size for *_, size in one["saved"] if size > bound]
            assert sum(wide) == one["rows"] * of_a_row, one


@pytest.mark.parametrize(("name", "tuner"), LAYOUTS)
def test_all_choices_of_tokens_are_rows_of_some_rank(finished: Ranks, name: str, tuner: str) -> None:
    sizes = Variant.parse(name).sizes
    for of_ranks in zip(*passes(finished, name, tuner), strict=True):
        chosen = TAKEN * sizes.get("etp", 1) * sum(one["tokens"] for one in of_ranks)
        assert sum(one["rows"] for one in of_ranks) == chosen
