"""Checks of the flags about rollouts (on disk, ahead of training), deadlines and conversations. Pure functions, as in
argument_checks.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def check_recording(dump: str | None, replay: str | None, only: bool) -> None:
    if replay is not None and dump is not None:
        raise ValueError(
            f"--rollout_replay {replay} generates nothing, so there is nothing for --rollout_dump {dump} that is not "
            "there already; leave one of them out"
        )
    if only and replay is not None:
        raise ValueError("--rollout_only true generates and --rollout_replay does not; leave one of them out")
    if only and dump is None:
        raise ValueError(
            "--rollout_only true generates completions that nothing keeps; add --rollout_dump with a folder"
        )


def check_ahead(asynchronous: bool, max_staleness: int | None, servers: bool, replay: str | None, only: bool) -> None:
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness must not be negative, got {max_staleness}; use --max_staleness 1")
    if not asynchronous:
        if max_staleness is not None:
            raise ValueError(
                f"--max_staleness {max_staleness} bounds how far --async_generate true may be ahead; add that flag, or "
                "leave this one out"
            )
        return
    other = "--rollout_only true trains nothing" if only else "--rollout_replay generates nothing" if replay else None
    if other is not None:
        raise ValueError(f"--async_generate true generates while it trains, and {other}; leave one of them out")
    if not servers:
        raise ValueError(
            "--async_generate true generates while it trains, and --vllm_mode colocate gives both the same GPUs; use "
            "--vllm_mode server with a `swift rollout` on GPUs of its own (templates/async_server.sh), or leave it out"
        )


def notes_ahead(max_staleness: int, sampling: Mapping[str, Any]) -> list[str]:
    """For the start-up log. `sampling`: values by flag."""
    neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    changed = [flag for flag, value in neutral.items() if sampling[flag] != value]
    if max_staleness == 0 or not changed:
        return []
    typed = " and ".join(f"--{flag} {sampling[flag]}" for flag in changed)
    instead = " ".join(f"--{flag} {neutral[flag]:g}" for flag in changed)
    return [
        "--async_generate true: vLLM's log-probs tell how far the policy has moved since older weights generated, and "
        f"with {typed} they are of another distribution than the policy's; use {instead}"
    ]


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
    _check_known("multi_turn_scheduler", scheduler, schedulers, "swift.rollout.multi_turn.multi_turns")
    if gym_env is not None:
        _check_known("gym_env", gym_env, environments, "swift.rollout.gym_env.envs")
    if scheduler in led_by_run:
        raise ValueError(
            f"--multi_turn_scheduler {scheduler} leads the conversation in a run() of its own, which ms-swift calls "
            "behind `swift rollout` only; use a scheduler with step() and on_turn_end()"
        )
    check_max_turns(max_turns)


def check_max_turns(max_turns: int | None) -> None:
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns must be > 0, got {max_turns}; leave --max_turns out for no limit")


def _check_known(flag: str, name: str, known: Iterable[str], registry: str) -> None:
    known = sorted(known)
    if name not in known:
        raise ValueError(
            f"unknown --{flag} {name}; known are {', '.join(known)}, and what a file given to --external_plugins adds "
            f"to {registry}"
        )


def check_deadlines(reward_timeout: float | None, phase_timeout: float) -> None:
    if phase_timeout < 0:
        raise ValueError(f"phase_timeout must not be negative, got {phase_timeout:g}; use --phase_timeout 0 for none")
    if reward_timeout is None:
        return
    if reward_timeout <= 0:
        raise ValueError(f"reward_timeout must be > 0, got {reward_timeout:g}; leave --reward_timeout out for none")
    if 0 < phase_timeout <= reward_timeout:
        raise ValueError(
            f"reward_timeout ({reward_timeout:g}) is not below phase_timeout ({phase_timeout:g}), which ends the run "
            f"before; use --phase_timeout {2 * reward_timeout:g}, or 0 for no limit"
        )
