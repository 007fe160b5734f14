"""Prompts that no template encodes are named before a model loads; long ones lose whole turns, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swift.model import get_processor
from swift.template import get_template

from scripts.make_tiny_model import make_tokenizer
from swift_megatron_grpo.data.checks import check_rows
from swift_megatron_grpo.data.encoded_rows import ImagesOfRow, _most_tokens, check_prompts
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.types import Prompt
from tests.unit.data.datasets import QUESTION, load, write
from tests.unit.model_config import QWEN3

SYSTEM = {"role": "system", "content": "be kind"}
OLD = [{"role": "user", "content": "old " * 60}, {"role": "assistant", "content": "answer " * 30}]
NEW = [{"role": "user", "content": "what is 1 + 1?"}]
LENGTH = 200  # tokens, one per byte


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return get_template(get_processor(str(folder), model_type="qwen3"), template_type="qwen3")


def checked(
    path: str, template: Any, strategy: str = "left", max_length: int | None = LENGTH
) -> tuple[Any, str | None]:
    dataset = load(path)
    check_rows(dataset, takes_images=False)
    images = [ImagesOfRow(0)] * len(dataset)
    return check_prompts(
        dataset, images, template, request=infer_request, max_length=max_length, strategy=strategy, name="dataset"
    )


def test_a_long_conversation_loses_its_oldest_turns(tmp_path: Path, template: Any) -> None:
    conversations = [[SYSTEM, *OLD, *OLD, *NEW], NEW, [*OLD, *NEW]]
    path = write(tmp_path / "a.jsonl", *({"messages": messages, "solution": "2"} for messages in conversations))
    dataset, note = checked(path, template)
    assert [row["messages"] for row in dataset] == [[SYSTEM, *NEW], NEW, NEW]
    assert dataset["solution"][:] == ["2"] * 3
    assert note is not None and note.startswith("--dataset: 2 of 3 prompts are longer than --max_length 200 (row 0 of ")
    assert note.endswith("; their oldest turns are left out (--truncation_strategy left)")
    assert checked(path, template, max_length=None)[1] is None


@pytest.mark.parametrize("strategy", ["left", "raise"])
def test_no_prompt_is_cut_within_a_turn(tmp_path: Path, template: Any, strategy: str) -> None:
    """Cut at the left it would begin within the system prompt, or within the tools, without a chat template's head."""
    path = write(tmp_path / "a.jsonl", QUESTION, {"messages": [SYSTEM, OLD[0]], "solution": "2"})
    advice = r"row 1 of \S*a.jsonl has 295 tokens\); use --max_length 295, or --truncation_strategy delete to leave"
    with pytest.raises(ValueError, match=advice):
        checked(path, template, strategy)
    dataset, note = checked(path, template, "delete")
    assert len(dataset) == 1 and note is not None and note.endswith("they are left out (--truncation_strategy delete)")
    only = write(tmp_path / "b.jsonl", *[{"messages": [OLD[0]], "solution": "2"}] * 2)
    with pytest.raises(ValueError, match=r"2 of 2 prompts are longer .*; use --max_length \d+$"):
        checked(only, template, "delete")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "system", "content": "c"}],
    ],
)
def test_messages_that_no_template_encodes_are_named(tmp_path: Path, template: Any, messages: list[Any]) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION, {"messages": messages, "solution": "2"})
    with pytest.raises(ValueError, match=r"1 of 2 rows of the dataset cannot be encoded: row 1 of \S*a.jsonl raises "):
        checked(path, template, max_length=None)


@pytest.mark.parametrize(
    "messages", [NEW, [SYSTEM, *NEW], [*OLD, *NEW], [SYSTEM, *OLD, *OLD, {"role": "user", "content": "é"}]]
)
def test_a_row_that_is_not_encoded_is_short_enough(template: Any, messages: list[dict[str, str]]) -> None:
    limit = _most_tokens({"messages": messages})
    template.set_mode("vllm")
    assert limit is not None
    assert len(template.encode(infer_request(Prompt("0-0", {"messages": messages})))["input_ids"]) <= limit
    assert _most_tokens({"messages": messages, "tools": ["{}"]}) is None
    assert _most_tokens({"messages": [*messages, *NEW]}) is None
