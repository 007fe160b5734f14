"""Datasets with --streaming true: the first rows alone are read, checked and kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import IterableDataset
from swift.dataset import load_dataset

from swift_megatron_grpo.data.checks import checked_loading, without_row_numbers
from swift_megatron_grpo.data.files import downloaded
from swift_megatron_grpo.data.streams import Stream
from tests.unit.data.datasets import load, write

ROWS = [{"query": f"{i}+1", "solution": str(i + 1)} for i in range(40)]


def streamed(*paths: str, rows: int = 5, buffer: int | None = None, columns: dict[str, str] | None = None) -> Any:
    options = {"load_from_cache_file": False, "remove_unused_columns": False, "columns": columns}
    with checked_loading(columns, Stream(rows, buffer, seed=3)):
        return load_dataset(list(paths), streaming=True, shuffle=False, **options)[0]


def test_the_first_rows_are_those_of_the_whole_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    assert streamed(path, rows=7).to_list() == load(path).select(range(7)).to_list()
    assert streamed(path, rows=100).to_list() == load(path).to_list()  # it has fewer


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_other_files_are_streamed_as_well(tmp_path: Path, kind: str) -> None:
    path, table = str(tmp_path / f"a.{kind}"), pandas.DataFrame(ROWS)
    {"csv": partial(table.to_csv, index=False), "parquet": table.to_parquet,
     "json": partial(table.to_json, orient="records")}[kind](path)  # fmt: skip
    assert streamed(path).to_list() == load(path).select(range(5)).to_list()


def test_sources_are_streamed_one_after_the_other(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl", *ROWS[:3]), write(tmp_path / "b.jsonl", *ROWS[3:])
    found = streamed(one, other)
    assert found["solution"][:] == [row["solution"] for row in ROWS[:8]]
    assert found["dataset"][2:4] == [one, other]


def test_a_column_that_the_first_row_lacks_is_kept(tmp_path: Path) -> None:
    found = streamed(write(tmp_path / "a.jsonl", ROWS[0], ROWS[1] | {"level": "hard"}))
    assert found["level"][:] == [None, "hard"]


def test_columns_with_fields_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1"}], "truth": {"value": str(i)}} for i in range(9)]
    path = write(tmp_path / "a.jsonl", *rows)
    found = streamed(path, columns={"truth.value": "solution"})
    assert found["solution"][:] == list("01234") and found["messages"][4] == rows[4]["prompt"]


def test_a_buffer_shuffles_and_a_longer_run_begins_with_the_same_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    short, long = (streamed(path, rows=rows, buffer=8)["solution"][:] for rows in (10, 40))
    assert short == long[:10] and long != [row["solution"] for row in ROWS]
    assert sorted(long, key=int) == [row["solution"] for row in ROWS]
    assert all(int(solution) <= place + 8 for place, solution in enumerate(long))  # none from beyond the buffer


def test_an_endless_stream_is_read_no_further_than_needed() -> None:
    taken = []

    def rows() -> Iterator[dict[str, int]]:
        for number in count():
            taken.append(number)
            yield {"number": number}

    open_stream = partial(IterableDataset.from_generator, rows)
    assert Stream(6, None, seed=0).first_rows(open_stream)["number"][:] == [*range(6)] and max(taken) <= 6
    taken.clear()
    assert len(Stream(6, 10, seed=0).first_rows(open_stream)) == 6 and max(taken) <= 16


def test_a_stream_that_breaks_off_is_named() -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield {"number": 1}
        raise ConnectionError("reset by peer")

    read = partial(Stream(6, None, seed=0).first_rows, partial(IterableDataset.from_generator, rows))
    with pytest.raises(ValueError, match=r"org/name cannot be loaded \(ConnectionError: reset by peer\)"):
        downloaded("file", lambda name: read(), "org/name")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"query": "1+1", "solution": "2"}\n{"query": \n', "line 2: not JSON"),
        ('{"query": "1+1", "solution": "2"}\n[1]\n', "line 2: not a JSON object"),
        ("", "it has no rows"),
        ('{"prompts": "1+1", "solution": "2"}\n', "has no messages"),
        ('{"messages": [{"role": "user"}]}\n{"messages": []}\n', "would not be trained"),
    ],
)
def test_rows_and_lines_that_cannot_be_read_are_named(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{fault}"):
        without_row_numbers(streamed(str(path)))
