"""Identities of the dataset, the tokenizer and the model of a checkpoint, and how they differ between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_SAMPLED_ROWS = 64
# Its tokens depend on the merges and on how text is split before them, which the vocabulary alone does not show.
_PROBE_TEXT = "The quick brown fox: 3.14159 + 2,718 = ?\n\tdéjà vu, 你好, Ünïcödé <think>{}</think>"


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """Number of rows, and digests of the first, the last, and some rows in between, by their index."""

    rows: int
    digests: Mapping[str, str]  # JSON has no integer keys


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Number of tokens, and a digest of the vocabulary, the end token and the tokens of a fixed text."""

    tokens: int
    digest: str


def dataset_identity(rows: Sequence[Mapping[str, Any]]) -> DatasetIdentity:
    """Return the identity of a dataset, in the order in which it was loaded."""
    last = len(rows) - 1
    places = sorted({last * step // (_SAMPLED_ROWS - 1) for step in range(_SAMPLED_ROWS)})
    return DatasetIdentity(len(rows), {str(place): _digest(rows[place]) for place in places})


def tokenizer_identity(tokenizer: Any) -> TokenizerIdentity:
    """Return the identity of a tokenizer of transformers; its chat template is not part of it."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens: list[int] = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    return TokenizerIdentity(
        len(vocabulary), _digest([sorted(vocabulary.items()), tokens, tokenizer.eos_token_id], size=16)
    )


def difference_of_models(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the values that differ between two models; None: they can load the same weights.

    A value that only one of them has does not count: transformers omits values that equal its defaults.
    """
    differing = [key for key in saved if key in here and saved[key] != here[key]]
    if not differing:
        return None
    values = ", ".join(f"{key} {saved[key]} instead of {here[key]}" for key in differing)
    return f"it was saved by a run of another model, with {values}; use the --model of that run"


def difference_of_tokenizers(saved: TokenizerIdentity, here: TokenizerIdentity) -> str | None:
    """Return how two tokenizers differ; None: they are the same."""
    if saved == here:
        return None
    if saved.tokens != here.tokens:
        how = f"of {saved.tokens} tokens instead of {here.tokens}"
    else:
        how = f"of as many tokens, {saved.tokens}, that encodes text differently"
    return f"it was saved by a run with another tokenizer, {how}; use the tokenizer files of that run"


def difference_of_datasets(saved: DatasetIdentity, here: DatasetIdentity) -> str | None:
    """Return how two datasets differ, as far as their sampled rows show it; None: they are the same."""
    if saved.rows != here.rows:
        return f"the dataset has {here.rows} rows, and had {saved.rows}"
    differing = [place for place in saved.digests if saved.digests[place] != here.digests.get(place)]
    if not differing:
        return None
    return (
        f"row {differing[0]} of the dataset is another one, and so are {len(differing) - 1} of the other "
        f"{len(saved.digests) - 1} rows that were compared"
    )


def _digest(value: Any, size: int = 8) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=size).hexdigest()
