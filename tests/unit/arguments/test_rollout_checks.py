"""Combinations of flags of recording, asynchronous generation, time limits and conversations."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.arguments.rollout_checks import (
    check_async,
    check_deadlines,
    check_recording,
    start_up_notes,
)
from swift_megatron_grpo.conversations.checks import check_multi_turn


def test_recording_flags_that_exclude_each_other() -> None:
    check_recording("dump", None, only=True)
    check_recording(None, "dump", only=False)
    for flags in (("a", "b", False), (None, "b", True), (None, None, True)):
        with pytest.raises(ValueError, match=r"leave one of them out|add --rollout_dump"):
            check_recording(*flags)


def test_flags_that_exclude_asynchronous_generation() -> None:
    def check(
        on: bool = True,
        staleness: int | None = None,
        servers: bool = True,
        replay: str | None = None,
        only: bool = False,
    ) -> None:
        check_async(on, staleness, servers, replay, only)

    check()
    check(staleness=0)
    check(staleness=3)
    check(on=False, servers=False, replay="folder")
    for flags, message in (
        ({"on": False, "staleness": 2}, "--max_staleness 2 limits .*--async_generate true; add that flag, or leave"),
        ({"staleness": -1}, "use --max_staleness 1"),
        ({"servers": False}, "use --vllm_mode server with `swift rollout` on separate GPUs"),
        ({"replay": "folder"}, "--rollout_replay does not generate; leave one of them out"),
        ({"only": True, "servers": False}, "--rollout_only true does not train; leave one of them out"),
    ):
        with pytest.raises(ValueError, match=message):
            check(**flags)  # type: ignore[arg-type]


def test_sampling_flags_that_distort_log_probs_of_older_weights_are_noted() -> None:
    plain: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    assert start_up_notes(1, plain) == [] == start_up_notes(0, {**plain, "top_p": 0.9})
    [note] = start_up_notes(1, {**plain, "top_p": 0.9, "top_k": 50})
    assert "with --top_p 0.9 and --top_k 50" in note and note.endswith("use --top_p 1 --top_k -1")


def test_time_limits_must_be_positive_and_nested() -> None:
    check_deadlines(None, 0, 120)
    check_deadlines(60, 3600, 120)
    check_deadlines(60, 0, 120)
    for flags, advice in (
        ((-1.0, 60.0, 9.0), "leave --reward_timeout out"),
        ((60.0, 60.0, 9.0), "use --phase_timeout 120"),
        ((None, -1.0, 9.0), "use --phase_timeout 0"),
        ((None, 0.0, 0.0), "--stop_grace 120"),
    ):
        with pytest.raises(ValueError, match=advice):
            check_deadlines(*flags)


def test_flags_of_conversations_must_name_registered_schedulers_and_environments() -> None:
    def check(scheduler: str | None = None, **flags: Any) -> None:
        given = {"max_turns": None, "use_gym_env": None, "gym_env": None, **flags}
        check_multi_turn(scheduler, **given, schedulers=["a", "b"], with_own_run=["b"], environments=["e"])

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
        ("b", {}, r"--multi_turn_scheduler b runs the conversation in its own run\(\)"),
        ("a", {"max_turns": 0}, "leave --max_turns out for no limit"),
    ):
        with pytest.raises(ValueError, match=message):
            check(scheduler, **flags)
