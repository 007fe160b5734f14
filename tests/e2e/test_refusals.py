"""Faults that only the assembled run can see end it before a model loads, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf

LOADING = "Loading: "  # progress bar of mcore-bridge, see test_adapter_settings.py


@pytest.mark.e2e
def test_a_setting_that_vllm_refuses_ends_the_run_before_a_model_loads(
    folder: Path, dense: Path, dataset: Path
) -> None:
    settings = json.dumps({"max_num_batched_tokens": -1})
    run = megatron_rlhf(dense, dataset, folder / "engine", 1, ["--vllm_engine_kwargs", settings])
    assert run.code != 0 and LOADING not in run.output
    assert "--vllm_engine_kwargs: vLLM refuses max_num_batched_tokens = -1: Input should be greater" in run.output


@pytest.mark.e2e
def test_rows_that_would_be_dropped_end_the_run_before_a_model_loads(folder: Path, dense: Path, dataset: Path) -> None:
    rows = dataset.read_text().splitlines()[:8]
    mixed = folder / "mixed.jsonl"
    mixed.write_text("\n".join([*rows, json.dumps({"query": "1+1", "letters": "a"})]))
    run = megatron_rlhf(dense, mixed, folder / "dropped", 1)
    assert run.code != 0 and LOADING not in run.output
    assert "1 of 9 rows of the dataset would not be trained: row 8 has query but no messages" in run.output
