"""Rows that cannot be trained on are named in an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.data.checks import check_no_earlier_turns, check_rows, check_tags, without_row_numbers
from tests.unit.data.datasets import QUESTION, load, write


def test_rows_without_a_user_turn_are_named(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}], "solution": "3"}
    dataset = load(write(tmp_path / "a.jsonl", QUESTION, system))
    with pytest.raises(ValueError, match=r"row 1 of \S*a.jsonl has no user turn, only system"):
        check_rows(dataset, takes_images=False)
    check_rows(load(write(tmp_path / "b.jsonl", QUESTION, QUESTION)), takes_images=False)
    check_rows(
        load(write(tmp_path / "c.jsonl", {"query": "1+1", "solution": "2"}, {"query": "2+2", "solution": "4"})), False
    )
    with pytest.raises(ValueError, match="the column teacher_images, which is not supported"):
        check_rows(
            load(write(tmp_path / "d.jsonl", QUESTION | {"teacher_images": []}, QUESTION | {"teacher_images": ["a"]})),
            takes_images=False,
        )


def test_a_row_has_the_number_of_its_file_after_shuffling(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}], "solution": "3"}
    one = write(tmp_path / "a.jsonl", *[QUESTION] * 40)
    other = write(tmp_path / "b.jsonl", *[QUESTION] * 17, system, *[QUESTION] * 22)
    dataset = load(one, other, shuffle=True)
    with pytest.raises(ValueError, match=rf"1 of 80 rows .* row 17 of {other} has no user turn"):
        check_rows(dataset, takes_images=False)
    assert {*without_row_numbers(dataset).column_names} & {"row_of_source"} == set()


@pytest.mark.parametrize(
    ("roles", "earlier"),
    [
        ("system user", 0),
        ("user assistant", 0),
        ("user assistant user", 1),
        ("user tool_call tool assistant", 1),
        ("user assistant user tool_call tool_response", 2),
    ],
)
def test_turns_that_no_policy_of_the_run_sampled_are_counted(tmp_path: Path, roles: str, earlier: int) -> None:
    messages = [{"role": role, "content": "{}"} for role in roles.split()]
    dataset = load(write(tmp_path / "a.jsonl", QUESTION, {"messages": messages, "solution": "3"}))
    if not earlier:
        return check_no_earlier_turns(dataset)
    with pytest.raises(ValueError, match=rf"row 1 of \S*a.jsonl has {earlier}; use --loss_scale last_round"):
        check_no_earlier_turns(dataset)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json"])
def test_a_prompt_in_the_column_text_is_refused_with_the_flag(tmp_path: Path, name: str) -> None:
    """ms-swift makes a response of a column named text; of text files and of arrays of strings it has only that."""
    lines = {"a.jsonl": ['{"text": "x"}', '{"text": "y"}'], "a.txt": ["x", "y"], "a.json": ['["x", "y"]']}
    (tmp_path / name).write_text("\n".join(lines[name]))
    with pytest.raises(
        ValueError, match=rf"{name}: row 0 .* has the columns text.*--columns '{{\"text\": \"query\"}}'"
    ):
        load(str(tmp_path / name))
    mapped = load(str(tmp_path / name), columns={"text": "query"})
    check_rows(mapped, takes_images=False)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": 7}], "has a content of type int"),
        ([{"role": "user", "content": [{"text": "x"}]}], "has a content with a part that has no type"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "has parts of type video"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            "has images in its messages, which this",
        ),
    ],
)
def test_content_that_no_template_encodes_is_refused(tmp_path: Path, messages: list[Any], problem: str) -> None:
    dataset = load(write(tmp_path / "a.jsonl", QUESTION, {"messages": messages, "solution": "3"}))
    with pytest.raises(ValueError, match=rf"row 1 of \S*a.jsonl {problem}"):
        check_rows(dataset, takes_images=False)


@pytest.mark.parametrize(
    ("column", "value", "takes_images"),
    [("images", ["a.png", "b.png"], False), ("videos", ["a.mp4"], True), ("audios", ["a.wav"], True)],
)
def test_rows_with_media_are_named_with_their_column(
    tmp_path: Path, column: str, value: list[str], takes_images: bool
) -> None:
    dataset = load(write(tmp_path / "a.jsonl", QUESTION | {column: []}, QUESTION | {column: value}))
    with pytest.raises(
        ValueError, match=f"1 of 2 rows .* row 1 of \\S*a.jsonl has {len(value)} in the column {column}"
    ):
        check_rows(dataset, takes_images)


def test_rows_with_images_are_for_models_that_take_them(tmp_path: Path) -> None:
    check_rows(load(write(tmp_path / "a.jsonl", QUESTION | {"images": ["a.png"]})), takes_images=True)
    videos = load(write(tmp_path / "b.jsonl", QUESTION | {"videos": ["a.mp4"]}))
    check_rows(videos, takes_images=True, takes_videos=True)
    with pytest.raises(ValueError, match="videos cannot be trained with this model: vLLM would choose frames that"):
        check_rows(videos, takes_images=True)


def test_rows_without_a_teacher_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(QUESTION | {"kind": kind} for kind in ("math", "code", None)))
    check_tags(load(write(tmp_path / "b.jsonl", QUESTION | {"kind": 7})), "kind", ["math", "7"])
    with pytest.raises(ValueError, match=r"2 of 3 rows .*row 1 of \S+ has 'code', row 2 of \S+ has None"):
        check_tags(load(path), "kind", ["math"])
    with pytest.raises(ValueError, match=r"the column sort \(--teacher_tag_key\), and the columns are .*kind"):
        check_tags(load(path), "sort", ["math"])


def test_a_tag_may_be_the_name_of_a_dataset(tmp_path: Path) -> None:
    """It is the default of --teacher_tag_key: ms-swift gives every row the name of its dataset."""
    path = write(tmp_path / "a.jsonl", QUESTION)
    check_tags(load(path), "dataset", [path])
