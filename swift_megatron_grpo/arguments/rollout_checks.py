"""Checks of the flags of recording, asynchronous generation and time limits. Pure functions, as in layout_checks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_recording(dump: str | None, replay: str | None, only: bool) -> None:
    """Check the combination of --rollout_dump, --rollout_replay and --rollout_only."""
    if replay is not None and dump is not None:
        raise ValueError(
            f"--rollout_replay {replay} does not generate rollouts, so --rollout_dump {dump} would only copy that "
            "folder; leave one of them out"
        )
    if only and replay is not None:
        raise ValueError(
            "--rollout_only true only generates, and --rollout_replay does not generate; leave one of them out"
        )
    if only and dump is None:
        raise ValueError(
            "--rollout_only true discards its rollouts unless they are written to disk; add --rollout_dump with a "
            "folder"
        )


def check_async(asynchronous: bool, max_staleness: int | None, servers: bool, replay: str | None, only: bool) -> None:
    """Check --async_generate and --max_staleness, and the flags that exclude them."""
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness must not be negative, got {max_staleness}; use --max_staleness 1")
    if not asynchronous:
        if max_staleness is not None:
            raise ValueError(
                f"--max_staleness {max_staleness} limits how far generation may be ahead with --async_generate true; "
                "add that flag, or leave this one out"
            )
        return
    conflicts = (("--rollout_only true does not train", only), ("--rollout_replay does not generate", replay))
    for conflict, present in conflicts:
        if present:
            raise ValueError(f"--async_generate true generates during training, and {conflict}; leave one of them out")
    if not servers:
        raise ValueError(
            "--async_generate true generates during training, and --vllm_mode colocate runs both on the same GPUs; use "
            "--vllm_mode server with `swift rollout` on separate GPUs (templates/async_server.sh), or leave it out"
        )


def start_up_notes(max_staleness: int, sampling: Mapping[str, Any]) -> list[str]:
    """Return notes for the start-up log. `sampling`: values by flag."""
    neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    changed = [flag for flag, value in neutral.items() if sampling[flag] != value]
    if max_staleness == 0 or not changed:
        return []
    typed = " and ".join(f"--{flag} {sampling[flag]}" for flag in changed)
    instead = " ".join(f"--{flag} {neutral[flag]:g}" for flag in changed)
    return [
        "--async_generate true: vLLM's log-probs measure how far the policy has moved since generation, and with "
        f"{typed} they belong to another distribution than the policy's; use {instead}"
    ]


def check_deadlines(reward_timeout: float | None, phase_timeout: float, stop_grace: float) -> None:
    """Check --reward_timeout, --phase_timeout and --stop_grace."""
    if stop_grace <= 0:
        raise ValueError(
            f"stop_grace must be > 0, got {stop_grace:g}; use the seconds that your cluster waits between SIGTERM and "
            "SIGKILL, for example --stop_grace 120"
        )
    if phase_timeout < 0:
        raise ValueError(
            f"phase_timeout must not be negative, got {phase_timeout:g}; use --phase_timeout 0 for no limit"
        )
    if reward_timeout is None:
        return
    if reward_timeout <= 0:
        raise ValueError(f"reward_timeout must be > 0, got {reward_timeout:g}; leave --reward_timeout out for no limit")
    if 0 < phase_timeout <= reward_timeout:
        raise ValueError(
            f"reward_timeout ({reward_timeout:g}) must be below phase_timeout ({phase_timeout:g}), which would end the "
            f"run first; use --phase_timeout {2 * reward_timeout:g}, or 0 for no limit"
        )
