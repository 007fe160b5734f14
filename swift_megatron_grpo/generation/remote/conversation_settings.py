"""Conversations behind servers have two command lines, of `swift rollout` and of the trainer, which must agree."""

from __future__ import annotations

from collections.abc import Mapping

from swift_megatron_grpo.config import RemoteTurnsConfig
from swift_megatron_grpo.protocol.messages import ConversationSettings

_SEVERAL_SAMPLES = ("thinking_tips_scheduler",)  # of one request, which are trained as if each was a completion
_OF_YOUR_OWN = "and --external_plugins with the file that registers what is not ms-swift's"


def disagreements(theirs: ConversationSettings | None, ours: RemoteTurnsConfig | None) -> list[str]:
    """Of one server and this run. What the run leaves out is the server's to decide."""
    if ours is None:
        return [] if theirs is None else [_not_asked_for(theirs)]
    if theirs is None:
        return [_not_led(ours)]
    if theirs.scheduler in _SEVERAL_SAMPLES:
        return [
            f"its --multi_turn_scheduler {theirs.scheduler} makes several samples of one request, and a conversation "
            "is one sample here; start it with another one"
        ]
    values = {
        "multi_turn_scheduler": (theirs.scheduler, ours.scheduler),
        "max_turns": (theirs.max_turns, ours.max_turns),
        "gym_env": (theirs.gym_env, ours.gym_env),
    }
    return [
        f"its --{flag} is {'not set' if their is None else their}, and this run's is {our}; give both the same, or "
        "leave it out here"
        for flag, (their, our) in values.items()
        if our is not None and their != our
    ]


def differences(leading: Mapping[str, ConversationSettings | None]) -> list[str]:
    """Between the servers of one run, by url."""
    if len(set(leading.values())) < 2:
        return []
    told = "; ".join(f"{url}: {'not at all' if each is None else _typed(each)}" for url, each in leading.items())
    return [f"the rollout servers lead conversations in different ways; start them all in the same one ({told})"]


def _not_asked_for(theirs: ConversationSettings) -> str:
    return (
        f"it leads conversations of several turns ({_typed(theirs)}), and this run asks for answers of one; add "
        f"--multi_turn_scheduler {theirs.scheduler} here (or --vllm_server_pass_dataset true, as scripts for "
        "ms-swift's trainer do), or start it without"
    )


def _not_led(ours: RemoteTurnsConfig) -> str:
    typed = [
        f"--multi_turn_scheduler {ours.scheduler or 'NAME'}",
        *([] if ours.max_turns is None else [f"--max_turns {ours.max_turns}"]),
        *([] if ours.gym_env is None else [f"--gym_env {ours.gym_env}"]),
    ]
    return (
        f"it was started without --multi_turn_scheduler, and this run asks for conversations of several turns "
        f"({ours.asked_by}); start it with {' '.join(typed)}, {_OF_YOUR_OWN}, or leave {ours.asked_by} out here"
    )


def _typed(leading: ConversationSettings) -> str:
    """As on the server's command line."""
    values = {
        "multi_turn_scheduler": leading.scheduler,
        "max_turns": leading.max_turns,
        "gym_env": leading.gym_env,
        "use_gym_env": "true" if leading.use_gym_env else None,
    }
    return " ".join(f"--{flag} {value}" for flag, value in values.items() if value is not None)
