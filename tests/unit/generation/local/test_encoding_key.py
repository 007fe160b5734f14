"""Turns share an encoding if nothing that a template may read differs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from swift.infer_engine.protocol import RolloutInferRequest

from swift_megatron_grpo.generation.local.conversations import encoding_key

MESSAGES = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": [3, 1, 4]}]  # text, and token ids
REQUEST = RolloutInferRequest(messages=MESSAGES, uuid="a")
OTHERS: dict[str, Any] = {
    "messages": [*MESSAGES, {"role": "user", "content": "Go on."}],
    "tools": [{"type": "function", "function": {"name": "calculate"}}],
    "objects": {"ref": ["a cat"]},
    "data_dict": {"solution": "4"},
    "add_eos": True,
    "chat_template_kwargs": {"enable_thinking": False},
}
MEDIA = ("images", "audios", "videos")


def test_conversations_of_a_prompt_share_it() -> None:
    assert encoding_key(REQUEST) == encoding_key(replace(REQUEST, uuid="b"))


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_request_does(name: str) -> None:
    assert encoding_key(replace(REQUEST, **{name: OTHERS[name]})) != encoding_key(REQUEST)


@pytest.mark.parametrize("name", MEDIA)
def test_media_are_not_shared(name: str) -> None:
    assert encoding_key(replace(REQUEST, **{name: ["a file"]})) is None


def test_objects_of_a_scheduler_are_not_shared() -> None:
    itself: dict[str, Any] = {}
    itself["self"] = itself
    for data in ({"environment": object()}, itself):
        assert encoding_key(replace(REQUEST, data_dict=data)) is None


def test_a_message_that_is_changed_later_does_not_change_what_is_shared() -> None:
    messages = [dict(message) for message in MESSAGES]
    before = encoding_key(replace(REQUEST, messages=messages))
    messages[-1]["content"] = [3, 1]
    assert before == encoding_key(REQUEST) != encoding_key(replace(REQUEST, messages=messages))


def test_every_field_is_one_of_these() -> None:
    """A field that a newer ms-swift adds is part of the key; say above what it is."""
    assert {field.name for field in fields(RolloutInferRequest)} == {"uuid", *OTHERS, *MEDIA}
