"""Flags of conversations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from swift.rollout import MultiTurnScheduler, multi_turns

from swift_megatron_grpo.arguments.environment import _check_turns, check_agent_reads_text
from swift_megatron_grpo.generation.conversations import checks
from swift_megatron_grpo.generation.conversations.agents import register_agent


def test_conversation_flags_name_registered_schedulers_and_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "multi_turns", {"a": MultiTurnScheduler, "b": MultiTurnScheduler})
    monkeypatch.setattr(checks, "envs", {"e": object})

    def check(scheduler: str | None = None, **flags: Any) -> None:
        given = {"max_turns": None, "use_gym_env": None, "gym_env": None, **flags}
        checks.check_multi_turn(SimpleNamespace(multi_turn_scheduler=scheduler, **given))

    check()
    check("a", max_turns=3, gym_env="e", use_gym_env=True)
    for scheduler, flags, message in (
        (None, {"max_turns": 3}, "--max_turns 3 needs .*add --multi_turn_scheduler"),
        (None, {"gym_env": "e"}, "--gym_env e needs .*add --multi_turn_scheduler with gym_scheduler"),
        (None, {"use_gym_env": True}, "--use_gym_env True needs"),
        (
            "c",
            {},
            "unknown name 'c' in --multi_turn_scheduler; known are a, b, and everything that a file given to",
        ),
        ("a", {"gym_env": "f"}, "unknown name 'f' in --gym_env; known are e"),
        ("a", {"max_turns": 0}, "leave --max_turns out for no limit"),
    ):
        with pytest.raises(ValueError, match=message):
            check(scheduler, **flags)


def test_conversations_that_branch_are_refused_on_media_and_limits_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(MultiTurnScheduler):
        async def async_infer(self, *_: Any, **__: Any) -> Any: ...

    monkeypatch.setitem(multi_turns, "branching", Branching)
    check_agent_reads_text("of a server alone", "images")
    with pytest.raises(ValueError, match=r"branching: rows of the dataset have images, .*async_infer"):
        check_agent_reads_text("branching", "images")
    flags = {"uses_servers": False, "multi_turn_scheduler": "branching", "max_turns": None, "gym_env": None}
    args: Any = SimpleNamespace(**flags, use_gym_env=None, completion_length_limit_scope="per_round")
    _check_turns(args)
    args.completion_length_limit_scope = "total"
    with pytest.raises(ValueError, match=r"branching .*--completion_length_limit_scope total .*use per_round"):
        _check_turns(args)


def test_agents_are_refused_on_rows_with_media() -> None:
    async def answer(row: dict[str, Any], base_url: str, api_key: str) -> None: ...

    register_agent("answering")(answer)
    try:
        for scheduler, media in ((None, "images"), ("math_tip_trick", "audio"), ("answering", None)):
            check_agent_reads_text(scheduler, media)
        with pytest.raises(ValueError, match=r"answering: rows of the dataset have videos.*; use a scheduler"):
            check_agent_reads_text("answering", "videos")
    finally:
        del multi_turns["answering"]
