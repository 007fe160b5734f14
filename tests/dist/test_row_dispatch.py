"""Rows that are sent once to a rank give the step that rows for each expert give."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import Task, task
from tests.dist.conftest import Ranks, selected
from tests.support.choice import rest_nightly

pytestmark = pytest.mark.dist
EP2 = ["--expert_model_parallel_size", "2"]
TP2 = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
FUSED = ["--moe_permute_fusion", "true"]
ONE_RANK = {"avoid": 2}  # of 4 experts: no row goes to the second rank
# By number of ranks: tuner, flags and more arguments of row_dispatch.main. Tokens have 2 of 4 experts.
CASES: dict[int, dict[str, tuple[str, list[str], dict[str, Any]]]] = {
    2: {
        "dp2+ep2": ("full", EP2, {}),
        "dp2+ep2, lora": ("lora", [*EP2, "--target_modules", "all-linear"], {}),
        "dp2+ep2+permute": ("full", [*EP2, *FUSED], {}),
        "dp2+ep2+recompute": ("full", [*EP2, "--recompute_granularity", "full", "--recompute_method", "uniform",
                                       "--recompute_num_layers", "1"], {}),
        "tp2+sp+ep2": ("full", [*EP2, *TP2], {}),
        "dp2+ep2, tokens are dropped": ("full", [*EP2, "--moe_expert_capacity_factor", "0.8"], {}),
        "a rank without rows": ("full", EP2, ONE_RANK),
        "a rank without rows+permute": ("full", [*EP2, *FUSED], ONE_RANK),
    },
    4: {"dp4+ep4": ("full", ["--expert_model_parallel_size", "4"], {})},
}  # fmt: skip
NAMES = [(number, name) for number in CASES for name in CASES[number]]
CHOSEN = [
    (2, "dp2+ep2, lora"),
    (2, "dp2+ep2+recompute"),
    (2, "tp2+sp+ep2"),
    (2, "dp2+ep2, tokens are dropped"),
    (2, "a rank without rows+permute"),
]
LEFT_TO_MEGATRON = {
    "etp2": [*TP2, "--expert_tensor_parallel_size", "2"],
    "slow kernels": [*EP2, "--fast_kernels", "false"],
}


@pytest.fixture(scope="module")
def finished(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """Run a step of each selected case in which rows are sent once, and one with Megatron's dispatcher."""
    tasks: dict[int, list[Task]] = {}
    for number, name in selected(request, "number", "name"):
        tuner, flags, more = CASES[number][name]
        tasks.setdefault(number, []).extend(
            task(
                "tests.programs.dist.row_dispatch:main",
                out=str(ranks.folder / f"rows-{name}-{once}"),
                flags=ranks.flags("moe-shallow", tuner, "float32", flags),
                once=once,
                **more,
            )
            for once in (True, False)
        )
    ranks.run_each("rows", tasks)
    return ranks


@pytest.mark.parametrize(("number", "name"), rest_nightly(NAMES, CHOSEN))
def test_the_step_is_the_same_with_fewer_rows(finished: Ranks, number: int, name: str) -> None:
    once, each = (finished.report(f"rows-{name}-{sent_once}", 0) for sent_once in (True, False))
    assert once["dispatchers"] == ["RowDispatcher"] and each["dispatchers"] == ["MoEAlltoAllTokenDispatcher"]
    assert once["metrics"] == pytest.approx(each["metrics"], rel=1e-6, abs=1e-9)
    assert once["weights"] == pytest.approx(each["weights"], rel=1e-6, abs=1e-5)
    assert each["rows"] > 0
    if "avoid" in CASES[number][name][2]:  # both experts of a token are on one rank
        assert once["rows"] == each["rows"] / 2
    elif number == 4:  # a rank has one expert
        assert once["rows"] == each["rows"]
    else:
        assert once["rows"] < each["rows"]


@pytest.mark.parametrize("case", list(LEFT_TO_MEGATRON))
def test_other_dispatchers_stay(ranks: Ranks, case: str) -> None:
    flags = ranks.flags("moe-shallow", "full", "float32", LEFT_TO_MEGATRON[case])
    ranks.call(f"rows-{case}", "row_dispatch:main", 2, flags, once=True)
    assert ranks.report(f"rows-{case}", 0)["dispatchers"] == ["MoEAlltoAllTokenDispatcher"]
