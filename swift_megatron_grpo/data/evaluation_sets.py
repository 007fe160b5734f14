"""The validation datasets of a run and their names; ms-swift leaves in every row the path or hub id it comes from."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.dataset import DATASET_MAPPING, DatasetSyntax

_SOURCE = "dataset"  # ms-swift's column
_NAME = re.compile(r"[\w.-]+")
_OTHER = re.compile(r"[^\w.-]")
_SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".parquet")


def names_of(datasets: Sequence[str], chosen: Sequence[str] | None) -> dict[str, str]:
    """Return the name of each of these datasets, by the values of ms-swift's column that its rows may have.

    `chosen`: the names of --eval_names, in order; by default a dataset has the name of its file or of its hub id.
    Entries of one file or hub id, with other subsets or sizes, are one dataset. Raises ValueError if the chosen names
    do not fit the datasets.
    """
    sources = list({_sources(typed): None for typed in datasets})
    files = [Path(source) for source, *_ in sources]
    stems = [_OTHER.sub("_", file.stem if file.suffix.lower() in _SUFFIXES else file.name) for file in files]
    default = [
        stem if stem not in stems[:i] else f"{stem}_{stems[: i + 1].count(stem)}" for i, stem in enumerate(stems)
    ]
    names = default if chosen is None else list(chosen)
    wrong = None
    if len(names) != len(sources):
        wrong = f"{len(names)} names for the {len(sources)} datasets of --val_dataset {' '.join(datasets)}"
    elif len(set(names)) < len(names):
        wrong = "each dataset needs a name of its own"
    elif not all(map(_NAME.fullmatch, names)):
        wrong = "a name has letters, digits, '.', '-' and '_' only"
    if wrong is not None:
        raise ValueError(f"--eval_names {' '.join(names)}: {wrong}; use --eval_names {' '.join(default)}")
    return {source: name for alternatives, name in zip(sources, names, strict=True) for source in alternatives}


def rows_by_name(rows: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of each dataset by its name; without names, all rows under an empty one."""
    if not names:
        return {"": rows}
    places: dict[str, list[int]] = {name: [] for name in names.values()}
    for place, source in enumerate(rows[_SOURCE]):
        places[names[source]].append(place)
    return {name: rows.select(chosen) for name, chosen in places.items() if chosen}


def _sources(typed: str) -> tuple[str, ...]:
    """Return the values that ms-swift's column may have for rows of this dataset."""
    dataset: str = DatasetSyntax.parse(typed).dataset
    meta = DATASET_MAPPING.get(dataset)
    others = () if meta is None else (meta.dataset_path, meta.hf_dataset_id, meta.ms_dataset_id)
    return (dataset, *(other for other in others if other is not None and other != dataset))
