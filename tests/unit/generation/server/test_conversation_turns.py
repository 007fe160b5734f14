"""Turns of a conversation on a server: one without room ends the conversation, or is refused if it is the first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.template import MaxLengthError

from swift_megatron_grpo.generation.conversations.turns import Turn
from swift_megatron_grpo.generation.server.conversations import _NoRoom, _TurnRecorder
from swift_megatron_grpo.generation.server.pipe import InvalidRequest

REQUEST = RolloutInferRequest(messages=[{"role": "user", "content": "hello"}])


def turn(recorder: _TurnRecorder, error: Exception) -> Any:
    async def infer(config: RequestConfig) -> Any:
        raise error

    return asyncio.run(recorder.generate(REQUEST, RequestConfig(), infer, frozenset()))


@pytest.mark.parametrize(
    ("error", "flag"), [(_NoRoom(), "--vllm_max_model_len"), (MaxLengthError("row(9) is larger"), "--max_length")]
)
def test_a_later_turn_without_room_ends_the_conversation(error: Exception, flag: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the first prompt leaves no room .* larger {flag}"):
        turn(_TurnRecorder(RequestConfig(), None), error)
    recorder = _TurnRecorder(RequestConfig(), None)
    first = Turn([1], [2], [-0.5])
    recorder.recorded.append(first)
    response = turn(recorder, error)
    assert response.choices[0].message.content == "" and recorder.recorded == [first]
    with pytest.raises(RuntimeError, match="has no room left"):
        turn(recorder, error)
