"""Validation of the multi-turn flags, and of names in ms-swift's registries, for the trainer and `swift rollout`."""

import difflib
from collections.abc import Iterable
from typing import Protocol

from swift.rollout import envs, multi_turns


class TurnFlags(Protocol):
    """The flags of conversations, which a trainer and a server have alike."""

    multi_turn_scheduler: str | None
    max_turns: int | None
    use_gym_env: bool | None
    gym_env: str | None


def check_multi_turn(flags: TurnFlags) -> None:
    """Raise ValueError if the multi-turn flags are inconsistent or name something unregistered."""
    scheduler, gym_env = flags.multi_turn_scheduler, flags.gym_env
    if scheduler is None:
        given = (("max_turns", flags.max_turns), ("use_gym_env", flags.use_gym_env), ("gym_env", gym_env))
        for flag, value in given:
            if value is not None and value is not False:
                known = "with gym_scheduler or another one" if "gym" in flag else "with one of ms-swift's"
                raise ValueError(f"--{flag} {value} needs multi-turn conversations; add --multi_turn_scheduler {known}")
        return
    check_registered("multi_turn_scheduler", [scheduler], multi_turns, "swift.rollout.multi_turn.multi_turns")
    if gym_env is not None:
        check_registered("gym_env", [gym_env], envs, "swift.rollout.gym_env.envs")
    check_max_turns(flags.max_turns)


def check_max_turns(max_turns: int | None) -> None:
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns must be > 0, got {max_turns}; leave --max_turns out for no limit")


def check_registered(flag: str, names: Iterable[str], known: Iterable[str], registry: str) -> None:
    """Raise ValueError for the first unregistered name, suggesting similar registered names."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            suggestion = f"; did you mean {' or '.join(close)}?" if close else ";"
            raise ValueError(
                f"unknown name {name!r} in --{flag}{suggestion} known are {', '.join(known)}, and everything that a "
                f"file given to --external_plugins adds to {registry}"
            )
