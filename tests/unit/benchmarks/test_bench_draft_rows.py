"""The benchmark of drafts: its expectation, and the prices that it computes from measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_draft_rows import (
    ARMS,
    BANDWIDTH,
    BYTES_OF_A_LOGIT,
    OPERATIONS,
    WORKLOAD,
    expected_ms,
    graph_sizes,
    parse,
    prices,
    speculation,
)
from benchmarks.harness.draft_prices import text_of, with_draft_prices
from benchmarks.harness.models import qwen3_config, text_sizes
from benchmarks.harness.other_pages import with_table
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.shapes import SHAPES


def parameters(name: str) -> int:
    """Count the parameters that a decode step multiplies with, in the model that transformers builds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_config(SHAPES[name], text_sizes(None, SHAPES[name])))
    embedding = 0 if SHAPES[name].tied else model.get_input_embeddings().weight.numel()
    return sum(weight.numel() for weight in model.parameters()) - embedding


@pytest.mark.parametrize("name", ["1.7b", "8b"])
def test_few_rows_are_expected_to_take_as_long_as_the_weights(name: str) -> None:
    shape, context = SHAPES[name], 500
    keys = 8 * context * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    logits = 8 * shape.vocabulary * BYTES_OF_A_LOGIT
    expected = 1000 * (2 * parameters(name) + keys + logits) / BANDWIDTH
    assert expected_ms(shape, 8, 0, context) == pytest.approx(expected, rel=1e-3)  # without the weights of norms


def test_many_rows_are_expected_to_take_as_long_as_operations() -> None:
    shape = SHAPES["8b"]
    more = expected_ms(shape, 128, 4) - expected_ms(shape, 128, 2)
    operations = 2 * 128 * 2 * parameters("8b") / OPERATIONS
    logits = 2 * 128 * shape.vocabulary * BYTES_OF_A_LOGIT / BANDWIDTH
    assert more == pytest.approx(1000 * (operations + logits), rel=1e-3)


def test_more_rows_read_more_experts_until_all_are_read() -> None:
    shape = SHAPES["30b-qwen3-moe"]
    everything = 1000 * 2 * parameters("30b-qwen3-moe") / BANDWIDTH
    assert expected_ms(shape, 16, 4) > 1.4 * expected_ms(shape, 16, 0)
    assert expected_ms(shape, 128, 0, context=0) == pytest.approx(everything, rel=0.02)
    assert expected_ms(shape, 128, 1) < 1.02 * expected_ms(shape, 128, 0)


def row(arm: str, depth: int, ms: float, busy: float | None = None, scheduling: str = "vllm") -> dict[str, Any]:
    return {"shape": "8b", "arm": arm, "running": 16, "depth": depth, "ms": ms, "busy_ms": busy,
            "scheduling": scheduling}  # fmt: skip


def test_a_price_compares_with_no_drafts_in_the_same_engine() -> None:
    measured = [row("v2-drafts", 0, 6.0, 4.0), row("v2-drafts", 4, 6.6, 5.0), row("v2", 0, 5.0, 4.0)]
    assert prices(measured) == [
        {"shape": "8b", "arm": "v2-drafts", "running": 16, "depth": 4, "step": pytest.approx(1.1), "busy": 1.25}
    ]


def test_the_first_runners_price_is_that_beside_its_engine_without_drafts() -> None:
    measured = [row("v1", 0, 5.0), row("v1", 0, 4.0, scheduling="ours"), row("v1-drafts-4", 4, 8.0)]
    assert [(price["step"], price["busy"]) for price in prices(measured)] == [(1.6, None)]
    assert prices([row("v1-drafts-4", 4, 8.0), row("v2-drafts", 0, 6.0)]) == []


def test_every_batch_has_a_graph_and_every_depth_a_number_of_requests() -> None:
    assert graph_sizes([8, 128], (0, 1, 4)) == [8, 16, 40, 128, 256, 640]
    table = speculation("v2-drafts", 128)["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert [depth for _, _, depth in table] == list(ARMS["v2-drafts"])
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert table[-1][1] == 128
    assert speculation("v2", 128) == speculation("v1", 128) == {}


def test_the_results_have_the_arguments_that_change_them() -> None:
    elsewhere = {"json", "shapes", "arms", "limit", "arm_limit", "work", "only", "part"}
    assert set(WORKLOAD) == set(vars(parse(["--json", "rows.json"]))) - elsewhere


def test_the_page_has_the_prices_of_the_file() -> None:
    path, marks, text = with_draft_prices(REPOSITORY)
    page = (REPOSITORY / path).read_text()
    assert page == with_table(page, marks, text), "run scripts/fix"
    found = [{"shape": "8b", "arm": "v2-drafts", "running": 16, "depth": 4, "step": 1.1, "busy": 1.2}]
    others = [{**found[0], "arm": "v1-drafts-4", "step": 3.0}, {**found[0], "depth": 1, "step": 2.0}]
    lines = text_of({"running": [64, 16], "prices": [*found, *others]}).splitlines()
    assert lines[2] == "| 16 | not measured | not measured | not measured | +10% | not measured | not measured |"
    assert lines[3].startswith("| 64 |")
