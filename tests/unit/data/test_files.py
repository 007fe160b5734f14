"""Files that ms-swift cannot read are refused with the file, the line and the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_megatron_grpo.data.files import fault_of_name
from tests.unit.data.datasets import QUESTION, load, write

LINE = json.dumps(QUESTION)
BROKEN = [
    ("cut.jsonl", f'{LINE}\n{{"messages": [{{"ro', "cut.jsonl, line 2: not JSON (Unterminated string"),
    ("array.jsonl", f"{LINE}\n[1]\n", "array.jsonl, line 2: not a JSON object; use one JSON object per line"),
    (
        "twice.jsonl",
        f'{LINE}\n{{"query": "a", "query": "b"}}\n',
        "twice.jsonl, line 2: an object has the key query twice",
    ),
    ("half.jsonl", f'{LINE}\n{{"query": "\\ud800"}}\n', "half.jsonl, line 2: \\ud800 is half of a surrogate pair"),
    ("latin.jsonl", f'{LINE}\n{{"query": "caf\xe9"}}\n', "latin.jsonl, line 2: the byte 0xe9 is not UTF-8; use iconv"),
    ("latin.csv", "query,solution\ncaf\xe9,7\n", "latin.csv, line 2: the byte 0xe9 is not UTF-8; use iconv"),
    ("blank.jsonl", "\n\n", "blank.jsonl, it has no rows; use a file"),
    ("mixed.json", '[{"query": "a"}, "b"]', "mixed.json, element 1 of its array is not a JSON object"),
    ("cut.json", '[{"query": "a"},\n{"que', "cut.json, line 2: not JSON"),
    ("long.csv", 'query,solution\n"a, b",7\nc, d,8\n', "long.csv, line 3: 3 values for the 2 columns query, solution"),
    ("short.csv", "query,solution\na,7\nc\n", "short.csv, line 3: 1 values for the 2 columns"),
]


@pytest.mark.parametrize(("name", "content", "fault"), BROKEN, ids=[name for name, *_ in BROKEN])
def test_a_file_that_cannot_be_read_is_refused_by_line(tmp_path: Path, name: str, content: str, fault: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError) as caught:
        load(str(tmp_path / name))
    assert fault in str(caught.value)


def test_a_parquet_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "rows.parquet"
    Dataset.from_list([QUESTION] * 9).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"rows.parquet, it cannot be read \(ArrowInvalid: .*Parquet"):
        load(str(path))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "rows.tsv",
            "cannot read a .tsv file; use .jsonl, .json, .csv, .txt, .parquet, .arrow, for example rows.jsonl",
        ),
        ("rows.jsonl.gz", "cannot read a .gz file; .* for example rows.jsonl"),
        ("rows.xyz", "cannot read a .xyz file"),
        ("rows.JSONL", "cannot read a .JSONL file"),
        ("rows", "cannot read a file without a suffix; .* for example rows.jsonl"),
        ("empty/", "the folder has no files"),
    ],
)
def test_a_file_without_a_reader_is_known_by_its_name(tmp_path: Path, name: str, fault: str) -> None:
    import re

    path = tmp_path / name
    path.mkdir() if name.endswith("/") else path.write_text(LINE)
    assert re.search(fault, fault_of_name(path) or "")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow", "rows.txt", "rows.xml"])
def test_a_file_with_a_reader_is_not_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LINE)
    assert fault_of_name(tmp_path / name) is None and fault_of_name(tmp_path) is None


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(ValueError, match=rf"{tmp_path} cannot be loaded \(.*; use the path of a file, or a hub id"):
        load(str(tmp_path))


def test_solutions_of_a_csv_file_stay_text(tmp_path: Path) -> None:
    """pandas makes 7 of 007 and 1.5 of 1.50, and reward functions that compare texts fail on numbers."""
    path = tmp_path / "rows.csv"
    path.write_text("query,solution,number\na,007,1\nb,1.50,2\n")
    dataset = load(str(path))
    assert dataset["solution"][:] == ["007", "1.50"] and dataset["number"][:] == [1, 2]
    renamed = tmp_path / "renamed.csv"
    renamed.write_text("query,gold\na,007\n")
    assert load(str(renamed), columns={"gold": "solution"})["solution"][:] == ["007"]
    joined = load(str(path), write(tmp_path / "rows.jsonl", {"query": "c", "solution": "x", "number": 3}))
    assert joined["solution"][:] == ["007", "1.50", "x"]


def test_a_name_of_columns_that_no_dataset_has_is_refused(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{name}.jsonl", {name: "1+1", "solution": "2"}) for name in ("ask", "query"))
    assert len(load(one, other, columns={"Ask": "query"})) == 2  # of one of the two, in any case
    with pytest.raises(ValueError, match=r"--columns names nosuch, and the columns are .*solution; use one of them"):
        load(other, columns={"nosuch": "query"})


def test_a_column_with_two_types_is_named(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{n}.jsonl", {"query": "a", "number": n}) for n in (1, "x"))
    with pytest.raises(ValueError, match=r"^the column number has another type in one dataset than in another"):
        load(one, other)


def test_a_hub_that_cannot_be_reached_is_named_with_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ValueError, match=r"nobody/nothing cannot be loaded \(.*; use the path of a file, or a hub id that"
    ):
        load("hf::nobody/nothing")
