"""Files of datasets: which ones ms-swift has a reader for, and, once it has failed, why it could not read one."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")


class _RepeatedKey(ValueError):
    """A JSON object has a key twice."""


def fault_of_name(path: Path) -> str | None:
    """Return why ms-swift has no reader for an existing file or folder. It chooses the reader by the suffix."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        return None if any(files) else "the folder has no files; use the path of a file, or a hub id"
    if path.suffix in DATA_SUFFIXES or path.suffix.removeprefix(".") in _PACKAGED_DATASETS_MODULES:
        return None
    unpacked = path.with_suffix("")
    wanted = unpacked if unpacked.suffix in DATA_SUFFIXES else path.with_suffix(".jsonl")
    kind = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
    return f"ms-swift cannot read {kind}; use {', '.join(DATA_SUFFIXES)}, for example {wanted.name}"


def read_file(read: Callable[..., Any], kind: str, path: str, text_columns: Sequence[str], **options: Any) -> Any:
    """Read a file with the reader of its kind. Raises ValueError with the file, and with the line if it has lines.

    `text_columns`: columns of a CSV file that stay text, where pandas would make numbers of them.
    """
    if kind == "csv":
        _check_csv(path)
        options["converters"] = dict.fromkeys(text_columns, str)
    try:
        return read(kind, data_files=path, **options)
    except Exception as error:  # whatever pandas, Arrow and datasets raise
        raise explained(path, error) from error


def explained(path: str, error: Exception) -> ValueError:
    """Return an error that names the file and its first wrong line, for one of pandas, Arrow or datasets."""
    fault = _fault_of_text(Path(path)) or f"it cannot be read ({_root_cause(error)}); use a valid file"
    return ValueError(f"{path}, {fault}")


def downloaded(path: str, load: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
    """Load a dataset or a model by its name. Raises ValueError with it. `path`: what may be used instead."""
    try:
        return load(name, *arguments, **options)
    except Exception as error:  # of the hub's client, of a network, or of the files in a folder
        raise ValueError(
            f"{name} cannot be loaded ({_root_cause(error)}); use the path of a {path}, or a hub id that this machine "
            "can download (--use_hf true: from Hugging Face, otherwise from ModelScope)"
        ) from error


def _root_cause(error: BaseException) -> str:
    """Return the first line of the error with which a chain of errors began."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _check_csv(path: str) -> None:
    """Raise ValueError for a row of another length than the header: pandas moves its values, or adds empty ones."""
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file)
        columns = next((row for row in rows if row), [])
        for row in rows:
            if row and len(row) != len(columns):
                raise ValueError(
                    f"{path}, line {rows.line_num}: {len(row)} values for the {len(columns)} columns "
                    f"{', '.join(columns)}; use quotes around values that contain a comma"
                )


def _fault_of_text(path: Path) -> str | None:
    """Return the first line of a text file that cannot be read, and why; None if no such line is found."""
    if not path.is_file():
        return None
    if path.suffix == ".json" and path.read_bytes().lstrip().startswith(b"["):
        return _fault_of_array(path.read_bytes())
    if path.suffix not in (".json", ".jsonl", ".csv", ".txt"):
        return None
    with path.open("rb") as file:
        return _fault_of_lines(file, is_json=path.suffix in (".json", ".jsonl"))


def _fault_of_lines(lines: Iterable[bytes], is_json: bool) -> str | None:
    written = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in written:
        try:
            is_row = isinstance(_parsed(line), dict) if is_json else bool(line.decode())
        except ValueError as error:
            return f"line {number}: {_fault_of_json(error)}"
        if not is_row:
            return f"line {number}: not a JSON object; use one JSON object per line"
    return None if written else "it has no rows; use a file with at least one"


def _fault_of_array(content: bytes) -> str | None:
    try:
        rows = _parsed(content)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}: {_fault_of_json(error)}"
    except ValueError as error:
        return _fault_of_json(error)
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
    return None if wrong is None else f"element {wrong} of its array is not a JSON object; use an array of objects"


def _parsed(content: bytes) -> Any:
    """Parse JSON as strictly as Arrow does. Raises ValueError."""
    value = json.loads(content.decode(), object_pairs_hook=_object)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return dict(pairs)


def _fault_of_json(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return (
            f"the byte {error.object[error.start]:#04x} is not UTF-8; use iconv -f latin1 -t utf-8 to convert the file"
        )
    if isinstance(error, UnicodeEncodeError):
        half = f"\\u{ord(error.object[error.start]):04x}"
        return f"{half} is half of a surrogate pair, which no text can contain; remove it"
    if isinstance(error, _RepeatedKey):
        return f"an object has the key {error} twice; remove one of them"
    return f"not JSON ({error}); use one JSON object per line"
