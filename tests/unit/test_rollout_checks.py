"""Flags about rollouts on disk, deadlines and conversations that cannot work together."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.rollout_checks import check_deadlines, check_multi_turn, check_recording


def test_recording_flags() -> None:
    check_recording("dump", None, only=True)
    check_recording(None, "dump", only=False)
    for flags in (("a", "b", False), (None, "b", True), (None, None, True)):
        with pytest.raises(ValueError, match=r"leave one of them out|add --rollout_dump"):
            check_recording(*flags)


def test_deadline_flags() -> None:
    check_deadlines(None, 0)
    check_deadlines(60, 3600)
    check_deadlines(60, 0)
    for flags, advice in (((-1.0, 60.0), "leave --reward_timeout out"), ((60.0, 60.0), "use --phase_timeout 120"),
                          ((None, -1.0), "use --phase_timeout 0")):  # fmt: skip
        with pytest.raises(ValueError, match=advice):
            check_deadlines(*flags)


def test_multi_turn_flags() -> None:
    def check(scheduler: str | None = None, **flags: Any) -> None:
        given = {"max_turns": None, "use_gym_env": None, "gym_env": None, **flags}
        check_multi_turn(scheduler, **given, schedulers=["a", "b"], led_by_run=["b"], environments=["e"])

    check()
    check("a", max_turns=3, gym_env="e", use_gym_env=True)
    for scheduler, flags, complaint in (
        (None, {"max_turns": 3}, "--max_turns 3 needs .*add --multi_turn_scheduler"),
        (None, {"gym_env": "e"}, "--gym_env e needs .*add --multi_turn_scheduler with gym_scheduler"),
        (None, {"use_gym_env": True}, "--use_gym_env True needs"),
        ("c", {}, "unknown --multi_turn_scheduler c; known are a, b, and what a file given to --external_plugins"),
        ("a", {"gym_env": "f"}, "unknown --gym_env f; known are e"),
        ("b", {}, r"--multi_turn_scheduler b leads the conversation in a run\(\) of its own"),
        ("a", {"max_turns": 0}, "leave --max_turns out for no limit"),
    ):
        with pytest.raises(ValueError, match=complaint):
            check(scheduler, **flags)
