"""Checks of the flags about rollouts (on disk, ahead of training), deadlines and conversations. Pure functions, as in
argument_checks.py."""

from __future__ import annotations

from collections.abc import Mapping
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
