"""Identities of datasets and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from swift_megatron_grpo.output.checkpoints.manifest import dataset_identity, tokenizer_identity


def rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": str(row)}]} for row in range(count)]


def test_first_and_last_row_and_some_in_between_are_part_of_the_identity() -> None:
    for count in (1, 2, 3, 64, 65, 10_000):
        identity = dataset_identity(rows(count))
        places = [int(place) for place in identity.digests]
        assert identity.rows == count and places[0] == 0 and places[-1] == count - 1
        assert len(places) == min(count, 64) and places == sorted(places)


def test_the_order_of_columns_is_no_difference() -> None:
    assert dataset_identity([{"a": 1, "b": 2}]) == dataset_identity([{"b": 2, "a": 1}])
    assert dataset_identity([{"a": 1, "b": 2}]) != dataset_identity([{"a": 1, "b": 3}])


def tokenizer(merges: list[tuple[str, str]], eos: str = "e") -> PreTrainedTokenizerFast:
    vocabulary = {token: place for place, token in enumerate(["T", "h", "e", "Th", "he", "The"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, merges)), eos_token=eos, unk_token=None, pad_token=None
    )


def test_a_tokenizer_is_identified_by_more_than_its_vocabulary(tmp_path: Path) -> None:
    first = tokenizer_identity(tokenizer([("T", "h"), ("Th", "e")]))
    assert first == tokenizer_identity(tokenizer([("T", "h"), ("Th", "e")]))
    assert first.tokens == 6
    other_merges = tokenizer_identity(tokenizer([("h", "e"), ("T", "he")][:1]))
    other_end = tokenizer_identity(tokenizer([("T", "h"), ("Th", "e")], eos="h"))
    assert len({first, other_merges, other_end}) == 3


def test_a_tokenizer_that_was_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    saved = tokenizer([("T", "h"), ("Th", "e")])
    saved.chat_template = "{{ messages }}"  # is not part of it
    saved.save_pretrained(tmp_path)
    assert tokenizer_identity(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == tokenizer_identity(saved)
