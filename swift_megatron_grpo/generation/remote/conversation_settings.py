"""Conflicts between the multi-turn flags of a run and those of its `swift rollout` servers."""

from __future__ import annotations

from collections.abc import Mapping

from swift_megatron_grpo.generation.protocol.messages import ConversationSettings
from swift_megatron_grpo.settings.config import RemoteTurnsConfig

_SEVERAL_SAMPLES = ("thinking_tips_scheduler",)  # schedulers that return several samples per request
_PLUGIN_HINT = "and --external_plugins with the file that registers whatever is not part of ms-swift"


def conflicts_with_run(server: ConversationSettings | None, run: RemoteTurnsConfig | None) -> list[str]:
    """Return the conflicts between one server and this run. Settings that the run leaves out are the server's."""
    if run is None:
        return [] if server is None else [_not_requested(server)]
    if server is None:
        return [_not_configured(run)]
    if server.scheduler in _SEVERAL_SAMPLES:
        return [
            f"its --multi_turn_scheduler {server.scheduler} returns several samples of one request, but here a "
            "conversation is one sample; start it with another scheduler"
        ]
    values = {
        "multi_turn_scheduler": (server.scheduler, run.scheduler),
        "max_turns": (server.max_turns, run.max_turns),
        "gym_env": (server.gym_env, run.gym_env),
    }
    return [
        f"its --{flag} is {'not set' if of_server is None else of_server}, and this run's is {of_run}; give both the "
        "same, or leave it out here"
        for flag, (of_server, of_run) in values.items()
        if of_run is not None and of_server != of_run
    ]


def conflicts_between_servers(conversations: Mapping[str, ConversationSettings | None]) -> list[str]:
    """Return the conflicts between the servers of one run, given their settings by URL."""
    if len(set(conversations.values())) < 2:
        return []
    listed = "; ".join(
        f"{url}: {'none' if settings is None else _as_flags(settings)}" for url, settings in conversations.items()
    )
    return [f"the rollout servers have different multi-turn flags; start all of them with the same ones ({listed})"]


def _not_requested(server: ConversationSettings) -> str:
    return (
        f"it runs multi-turn conversations ({_as_flags(server)}), but this run requests single-turn completions; add "
        f"--multi_turn_scheduler {server.scheduler} here (or --vllm_server_pass_dataset true, as scripts for "
        "ms-swift's trainer do), or start it without"
    )


def _not_configured(run: RemoteTurnsConfig) -> str:
    flags = [
        f"--multi_turn_scheduler {run.scheduler or 'NAME'}",
        *([] if run.max_turns is None else [f"--max_turns {run.max_turns}"]),
        *([] if run.gym_env is None else [f"--gym_env {run.gym_env}"]),
    ]
    if run.requested_by is None:
        return (
            "it was started without --multi_turn_scheduler, but this run has no reward function, so an environment of "
            "the server must grade; use --reward_funcs here, or start it with --multi_turn_scheduler gym_scheduler "
            f"--use_gym_env true --gym_env NAME, {_PLUGIN_HINT}"
        )
    return (
        f"it was started without --multi_turn_scheduler, but this run requests multi-turn conversations "
        f"({run.requested_by}); start it with {' '.join(flags)}, {_PLUGIN_HINT}, or leave {run.requested_by} out here"
    )


def _as_flags(settings: ConversationSettings) -> str:
    """Format settings as on the server's command line."""
    values = {
        "multi_turn_scheduler": settings.scheduler,
        "max_turns": settings.max_turns,
        "gym_env": settings.gym_env,
        "use_gym_env": "true" if settings.use_gym_env else None,
    }
    return " ".join(f"--{flag} {value}" for flag, value in values.items() if value is not None)
