"""A second prompt of a row: what the teacher reads before the same completion, and which prompts are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swift.model import get_processor
from swift.template import get_template

from scripts.make_tiny_model import make_tokenizer
from swift_megatron_grpo.data.encoded_rows import check_teacher_prompts
from swift_megatron_grpo.data.teacher_prompts import TeacherPrompts
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.loop.samples import as_teacher_reads, samples_of
from swift_megatron_grpo.types import Graded, Prompt, Rollout
from tests.unit.data.datasets import QUESTION, load, write
from tests.unit.model_config import QWEN3

HINT = "1+1, which is 2"
CONVERSATION = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}, *QUESTION["messages"]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return get_template(get_processor(str(folder), model_type="qwen3"), template_type="qwen3")


def encoded(template: Any, text: str, before: list[dict[str, str]] | None = None) -> list[int]:
    template.set_mode("vllm")
    row = {"messages": [*(before or []), {"role": "user", "content": text}]}
    return list(template.encode(infer_request(Prompt("0-0", row)))["input_ids"])


def rollout(template: Any, row: dict[str, Any], **given: Any) -> Rollout:
    prompt = Prompt(f"0-{row.get('teacher_prompt')}", row)
    own = encoded(template, row["messages"][-1]["content"], row["messages"][:-1])
    values: dict[str, Any] = {"prompt_ids": own, "completion_ids": [5, 6, 7]}
    return Rollout(prompt, logprobs=None, text="", finish_reason="stop", weights_version=0, **values | given)


@pytest.mark.parametrize("text", [HINT, "?"], ids=["longer", "shorter"])
def test_the_last_turn_of_the_user_is_another_one_for_the_teacher(template: Any, text: str) -> None:
    row = {"messages": CONVERSATION, "teacher_prompt": text}
    rollouts = [rollout(template, row, sampled=[True, False, True]), rollout(template, row, completion_ids=[8])]
    graded = [Graded(completion, [1.0], 1.0, 0.5) for completion in rollouts]
    samples = samples_of(graded, 2, False, None, teacher_prompts=TeacherPrompts(template, infer_request))
    expected = encoded(template, text, CONVERSATION[:2])
    assert len(expected) != len(rollouts[0].prompt_ids)
    masks = ([True, False, True], [True])
    for sample, seen, of_rollout, mask in zip(samples, as_teacher_reads(samples), rollouts, masks, strict=True):
        assert seen.tokens == expected + of_rollout.completion_ids
        assert seen.completion_mask == [False] * len(expected) + mask
        assert sample.tokens == of_rollout.prompt_ids + of_rollout.completion_ids


@pytest.mark.parametrize("row", [QUESTION, QUESTION | {"teacher_prompt": None}, QUESTION | {"teacher_prompt": ""}])
def test_a_teacher_without_its_own_prompt_reads_the_policys(template: Any, row: dict[str, Any]) -> None:
    [sample] = samples_of([Graded(rollout(template, row), [1.0], 1.0, 0.5)], 1, False, None,
                          teacher_prompts=TeacherPrompts(template, infer_request))  # fmt: skip
    assert as_teacher_reads([sample]) == [sample]


def test_a_teacher_reads_the_turns_before_the_first_trained_one(template: Any) -> None:
    row, turn = QUESTION | {"teacher_prompt": HINT}, [{"role": "assistant", "content": "x"}]
    own = encoded(template, "1+1")
    several = rollout(template, row, prompt_ids=[*own, 9, 10], messages=turn)
    assert TeacherPrompts(template, infer_request).tokens([several]) == [[*encoded(template, HINT), 9, 10, 5, 6, 7]]
    changed = rollout(template, row, prompt_ids=[9, *own], messages=turn)
    with pytest.raises(RuntimeError, match=r"the conversation of prompt 0-.* does not begin with its prompt"):
        TeacherPrompts(template, infer_request).tokens([changed])


def test_prompts_that_a_teacher_cannot_read_are_named(tmp_path: Path, template: Any) -> None:
    def found(*prompts: Any, limit: int | None = 200) -> bool:
        rows = [QUESTION | {"teacher_prompt": prompt} for prompt in prompts]
        return check_teacher_prompts(load(write(tmp_path / "a.jsonl", *rows)), template, infer_request, limit)

    assert not check_teacher_prompts(load(write(tmp_path / "b.jsonl", QUESTION)), template, infer_request, 200)
    assert not found("", None, "") and found("", HINT) and found("x" * 300, limit=None)
    with pytest.raises(ValueError, match=r"1 of 2 rows .* more tokens than --max_length 200: row 1 of \S+ has 3\d\d; "):
        found(HINT, "x" * 300)
    with pytest.raises(ValueError, match=r"2 of 2 rows .* have no text in the column teacher_prompt: .* type list"):
        found(["a"], ["b"])
