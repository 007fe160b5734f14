"""Names of validation datasets, and their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from swift_megatron_grpo.data.evaluation_sets import names_of, rows_by_name


def test_datasets_are_named_after_their_files_and_hub_ids(tmp_path: Path) -> None:
    file = tmp_path / "gsm 8k.test.jsonl"
    file.write_text("{}")
    names = names_of([f"{file}#10", "org/math-500", "hf::other/aime.v2:main#30"], None)
    assert names == {str(file): "gsm_8k.test", "org/math-500": "math-500", "other/aime.v2": "aime.v2"}


def test_datasets_of_one_name_are_numbered_entries_of_one_id_are_joined() -> None:
    assert names_of(["a/test.jsonl", "b/test.jsonl"], None) == {"a/test.jsonl": "test", "b/test.jsonl": "test_2"}
    assert names_of(["org/x:main", "org/x:socratic"], None) == {"org/x": "x"}


def test_chosen_names_have_the_order_of_the_datasets() -> None:
    assert names_of(["org/a", "org/b"], ["math", "code"]) == {"org/a": "math", "org/b": "code"}


@pytest.mark.parametrize(
    ("chosen", "wrong"),
    [
        (["math"], "1 names for the 2 datasets of --val_dataset org/a org/b"),
        (["math", "math"], "each dataset needs a name of its own"),
        (["math", "co/de"], "a name has letters"),
    ],
)
def test_names_that_cannot_be_those_of_the_datasets_are_refused(chosen: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"--eval_names {' '.join(chosen)}: {wrong}.*; use --eval_names a b"):
        names_of(["org/a", "org/b"], chosen)


def test_rows_are_grouped_by_the_column_that_ms_swift_adds() -> None:
    rows = Dataset.from_list([{"dataset": source, "n": n} for n, source in enumerate(["x", "y", "x"])])
    parts = rows_by_name(rows, {"x": "math", "y": "code", "z": "empty"})
    assert {name: part["n"][:] for name, part in parts.items()} == {"math": [0, 2], "code": [1]}
    assert rows_by_name(rows, {}) == {"": rows}
