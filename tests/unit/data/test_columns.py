"""Rows of verl and of TRL: messages in the column `prompt`, and the solution in a field of a dictionary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_megatron_grpo.cli.convert.tables import convert
from swift_megatron_grpo.cli.convert.verl import VERL
from tests.unit.data.datasets import load, write

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4 = ?"}]
OF_VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CONVERSATION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"split": "train", "index": 0, "answer": "3 + 4 = 7 #### 7"},
}


def parquet(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def test_messages_are_read_from_the_column_prompt(tmp_path: Path) -> None:
    verl = load(parquet(tmp_path / "a.parquet", OF_VERL, OF_VERL))
    trl = load(write(tmp_path / "a.jsonl", {"prompt": CONVERSATION, "answer": "7"}))
    assert len(verl) == 2 and verl[0]["messages"] == trl[0]["messages"] == CONVERSATION
    assert verl[0]["reward_model"]["ground_truth"] == trl[0]["answer"] == "7"


def test_the_columns_of_a_converted_script_give_accuracy_its_solution(tmp_path: Path) -> None:
    [columns] = convert({"data.train_files": "a.parquet"}, VERL).flags["columns"]
    row = load(parquet(tmp_path / "a.parquet", OF_VERL), columns=json.loads(columns))[0]
    assert row["messages"] == CONVERSATION and row["solution"] == "7" and row["data_source"] == "openai/gsm8k"


def test_a_field_replaces_a_column_of_its_new_name(tmp_path: Path) -> None:
    mapping = {"extra_info.answer": "solution", "reward_model.nothing.deeper": "b"}
    path = parquet(tmp_path / "a.parquet", OF_VERL | {"solution": "8"})
    with pytest.raises(ValueError, match=r"--columns: no row of the dataset has reward_model\.nothing\.deeper; its"):
        load(path, columns=mapping)
    del mapping["reward_model.nothing.deeper"]
    row = load(path, columns=mapping)[0]
    assert row["solution"] == "3 + 4 = 7 #### 7"


def test_prompts_that_are_texts_stay_texts(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.jsonl", {"prompt": "3 + 4 = ?"}))[0]["messages"][0]["content"] == "3 + 4 = ?"
