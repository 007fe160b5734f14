"""Checks of the flags for conversations of several turns; the trainer and `swift rollout` both call them."""

from __future__ import annotations

from collections.abc import Iterable

from swift_megatron_grpo.conversations.registries import check_registered


def check_multi_turn(
    scheduler: str | None,
    max_turns: int | None,
    use_gym_env: bool | None,
    gym_env: str | None,
    schedulers: Iterable[str],
    led_by_run: Iterable[str],
    environments: Iterable[str],
) -> None:
    """`schedulers`, `environments`: ms-swift's registries; `led_by_run`: those with a `run` of their own."""
    if scheduler is None:
        for flag, value in (("max_turns", max_turns), ("use_gym_env", use_gym_env), ("gym_env", gym_env)):
            if value:
                known = "with gym_scheduler or another one" if "gym" in flag else "with one of ms-swift's"
                raise ValueError(
                    f"--{flag} {value} needs turns that follow each other; add --multi_turn_scheduler {known}"
                )
        return
    check_registered("multi_turn_scheduler", [scheduler], schedulers, "swift.rollout.multi_turn.multi_turns")
    if gym_env is not None:
        check_registered("gym_env", [gym_env], environments, "swift.rollout.gym_env.envs")
    if scheduler in led_by_run:
        raise ValueError(
            f"--multi_turn_scheduler {scheduler} leads the conversation in a run() of its own, which ms-swift calls "
            "behind `swift rollout` only; use a scheduler with step() and on_turn_end()"
        )
    check_max_turns(max_turns)


def check_max_turns(max_turns: int | None) -> None:
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns must be > 0, got {max_turns}; leave --max_turns out for no limit")
