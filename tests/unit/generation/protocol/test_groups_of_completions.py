"""A completion may come with the others of its prompt; a server that nests more of them is at fault."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swift_megatron_grpo.generation.protocol.messages import Completion, InvalidMessage

ONE = Completion([1], [2, 3], [-1.0, -0.5], "one", "stop", 3)


def test_a_group_survives_the_way_through_json() -> None:
    group = replace(ONE, others=(replace(ONE, text="two"), replace(ONE, text="three")))
    assert Completion.from_json(json.loads(json.dumps(group.to_json()))) == group


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_group_that_is_nested_without_end_is_refused(depth: int) -> None:
    one = message = ONE.to_json()
    for _ in range(depth):
        message = {**one, "others": [message]}
    with pytest.raises(InvalidMessage) as refusal:
        Completion.from_json(message)
    assert len(str(refusal.value)) < 1_000
