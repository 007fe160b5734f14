"""The models of --reward_model: checks of their plugins, and the functions that call them."""

from __future__ import annotations

import os

from swift.rewards import rm_plugins

from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.grading.reward_servers import RewardServer
from swift_megatron_grpo.settings.reward_models import RewardModels


def check_plugins(models: RewardModels) -> None:
    """Check --reward_model_plugin: of a judge it makes requests and reads scores."""
    plugins = [model.plugin for model in models.all]
    check_registered("reward_model_plugin", plugins, rm_plugins, "swift.rewards.rm_plugins")
    for model in models.all:
        entry = rm_plugins[model.plugin]
        missing = [name for name in ("request", "score") if not callable(getattr(entry, name, None))]
        if model.is_judge and missing:
            raise ValueError(
                f"--reward_model_plugin {model.plugin}: {entry.__name__} has no method {missing[0]}, which a judge "
                "behind a server needs; use a class with request(self, row) and score(self, text)"
            )


def create_servers(args: DerivedArguments) -> list[RewardServer]:
    """Create the callers of the servers of --reward_model, and the plugins of judges."""
    settings, key = args.of(RewardModels), os.environ.get("SWIFT_REWARD_API_KEY")
    servers = []
    for model in settings.all:
        assert model.address is not None and model.route is not None
        try:
            judge = rm_plugins[model.plugin]() if model.is_judge else None
        except Exception as error:
            raise ValueError(
                f"--reward_model_plugin {model.plugin}: creating it raises {type(error).__name__}: {error}; a judge's "
                "plugin is created without arguments: correct its __init__, or leave it out"
            ) from error
        drops, seconds = args.bad_reward == "drop", settings.reward_model_timeout
        servers.append(RewardServer(model.address, model.route, judge, seconds, drops, key))
    return servers
