"""Rows with answers: encoded as ms-swift encodes them for training, taken by seed and step, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from swift.model import get_processor
from swift.template import get_template

from scripts.make_tiny_model import make_tokenizer
from swift_megatron_grpo.data.answers import Answer, AnswerSource, encode_answers
from tests.unit.model_config import QWEN3

TOOL = "Action: search\nAction Input: x"
ROWS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": TOOL},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return folder


def template_of(folder: Path, loss_scale: str) -> Any:
    return get_template(get_processor(str(folder), model_type="qwen3"), template_type="qwen3", loss_scale=loss_scale)


def dataset(*conversations: list[dict[str, str]], **columns: Any) -> Dataset:
    return Dataset.from_list([{"messages": messages, **columns} for messages in conversations])


@pytest.mark.parametrize(
    ("loss_scale", "weights"),
    [("last_round", {1.0}), ("default", {1.0}), ("all", {1.0}), ("last_round+react", {1.0, 2.0})],
)
def test_tokens_and_weights_are_those_of_ms_swifts_template(folder: Path, loss_scale: str, weights: set[float]) -> None:
    template = template_of(folder, loss_scale)
    answers, left_out = encode_answers(dataset(*ROWS), template, None, leave_out=False)
    assert left_out == 0 and {weight for answer in answers for weight in answer.weights} == weights
    template.set_mode("train")
    for answer, messages in zip(answers, ROWS, strict=True):
        encoded = template.encode({"messages": messages})
        [trained] = np.nonzero(np.asarray(encoded["labels"]) != -100)
        assert answer.tokens.tolist() == list(encoded["input_ids"])
        assert np.nonzero(answer.trained)[0].tolist() == trained.tolist()
        scale = encoded.get("loss_scale")
        assert answer.weights.tolist() == ([1.0] * len(trained) if scale is None else [scale[i] for i in trained])


def test_rows_that_cannot_be_trained_are_refused(folder: Path) -> None:
    template = template_of(folder, "last_round")
    answer = ROWS[0]

    def refused(rows: Dataset, longest: int | None = None, leave_out: bool = False) -> str:
        with pytest.raises(ValueError) as fault:
            encode_answers(rows, template, longest, leave_out)
        return str(fault.value)

    assert "row 1 has none; end them with a turn of the assistant" in refused(dataset(answer, answer[:1]))
    assert "row 0 has images" in refused(dataset(answer, images=["a.png"]))
    assert "row 1 has no user turn" in refused(dataset(answer, answer[1:]))
    assert "row 0 raises" in refused(dataset([answer[0], {"role": "stranger", "content": "2"}]))
    long = dataset(answer, [answer[0], {"role": "assistant", "content": "x" * 200}])
    assert "more than 100 tokens" in refused(long, 100) and "row 1 has 2" in refused(long, 100)
    assert "more than 3 tokens" in refused(long, 3, leave_out=True)  # all of them
    kept, left_out = encode_answers(long, template, 100, leave_out=True)
    assert (len(kept), left_out) == (1, 1)


def test_an_image_tag_in_a_text_opens_no_file(folder: Path) -> None:
    text = "<img>/etc/hostname</img>"
    [answer], _ = encode_answers(dataset([ROWS[0][0], {"role": "assistant", "content": text}]),
                                 template_of(folder, "last_round"), None, leave_out=False)  # fmt: skip
    assert len(answer.tokens) > len(text)


def test_answers_of_a_step_depend_on_seed_and_step_only() -> None:
    rows = [Answer(np.asarray([0, i]), np.asarray([False, True]), np.asarray([0.5])) for i in range(5)]
    source = AnswerSource(rows, seed=3, per_step=4)
    later = AnswerSource(rows, seed=3, per_step=4).of_step(2)
    taken = [[sample.tokens[1] for sample in source.of_step(step)] for step in range(5)]
    assert [sample.tokens[1] for sample in later] == taken[2]
    flat = [row for step in taken for row in step]
    epochs = [flat[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert [sample.group for sample in later] == [-1, -2, -3, -4]
    assert later[0].sft_weights == [0.5] and later[0].completion_mask == [False, True]
