"""Rows that cannot be trained on are named in an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.data.checks import check_rows
from tests.unit.data.datasets import QUESTION, load, write


def test_rows_without_a_user_turn_are_named(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}], "solution": "3"}
    dataset = load(write(tmp_path / "a.jsonl", QUESTION, system))
    with pytest.raises(ValueError, match="row 1 has no user turn, only system"):
        check_rows(dataset, takes_images=False)
    check_rows(load(write(tmp_path / "b.jsonl", QUESTION, QUESTION)), takes_images=False)
    check_rows(
        load(write(tmp_path / "c.jsonl", {"query": "1+1", "solution": "2"}, {"query": "2+2", "solution": "4"})), False
    )
    with pytest.raises(ValueError, match="teacher_prompt"):
        check_rows(
            load(write(tmp_path / "d.jsonl", QUESTION | {"teacher_prompt": "x"}, QUESTION | {"teacher_prompt": "y"})),
            takes_images=False,
        )


def test_a_dataset_without_user_turns_is_refused_with_the_flag_that_maps(tmp_path: Path) -> None:
    """ms-swift takes a column named text for the response, and makes messages of it."""
    dataset = load(write(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y"}))
    with pytest.raises(
        ValueError, match=r"2 of 2 rows .* only assistant.* or map the column with the prompt: --columns"
    ):
        check_rows(dataset, takes_images=False)


@pytest.mark.parametrize(
    ("column", "value", "takes_images"),
    [("images", ["a.png", "b.png"], False), ("videos", ["a.mp4"], True), ("audios", ["a.wav"], True)],
)
def test_rows_with_media_are_named_with_their_column(
    tmp_path: Path, column: str, value: list[str], takes_images: bool
) -> None:
    dataset = load(write(tmp_path / "a.jsonl", QUESTION | {column: []}, QUESTION | {column: value}))
    with pytest.raises(ValueError, match=f"1 of 2 rows .* row 1 has {len(value)} in the column {column}"):
        check_rows(dataset, takes_images)


def test_rows_with_images_are_for_models_that_take_them(tmp_path: Path) -> None:
    check_rows(load(write(tmp_path / "a.jsonl", QUESTION | {"images": ["a.png"]})), takes_images=True)


def test_text_that_mentions_an_image_is_text(tmp_path: Path) -> None:
    tag = {"messages": [{"role": "user", "content": "what does <image> mean in HTML?"}], "images": []}
    check_rows(load(write(tmp_path / "a.jsonl", tag, tag)), takes_images=True)
