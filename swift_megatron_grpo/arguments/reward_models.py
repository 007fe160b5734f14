"""The models of --reward_model: checks of their plugins, and the functions that call them."""

import os

from swift.rewards import rm_plugins
from swift.utils import safe_snapshot_download

from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.grading.reward_servers import RewardServer
from swift_megatron_grpo.settings.reward_models import RewardModel, RewardModels

_OF_JUDGES = {"request": "request(self, row)", "score": "score(self, text)"}
_OF_RANKS = {"__call__": "__call__(self, inputs, **kwargs), created with model and template"}


def check_plugins(models: RewardModels) -> None:
    """Check --reward_model_plugin: of a judge it makes requests and reads scores, of other models it calls them."""
    plugins = [model.plugin for model in models.all]
    check_registered("reward_model_plugin", plugins, rm_plugins, "swift.rewards.rm_plugins")
    for model in models.all:
        entry = rm_plugins[model.plugin]
        methods = _OF_JUDGES if model.is_judge else _OF_RANKS
        missing = [name for name in methods if name not in dir(entry)]
        if missing and (model.is_judge or model.address is None):
            place = "a judge behind a server" if model.is_judge else "a model in the ranks"
            raise ValueError(
                f"--reward_model_plugin {model.plugin}: {entry.__name__} has no method {missing[0]}, which {place} "
                f"needs; use a class with {' and '.join(methods.values())}"
            )


def create_servers(args: DerivedArguments) -> list[RewardServer | None]:
    """Create the callers of the servers of --reward_model, and the plugins of judges; None for models of the ranks."""
    settings, key = args.of(RewardModels), os.environ.get("SWIFT_REWARD_API_KEY")
    servers: list[RewardServer | None] = []
    for model in settings.all:
        if model.address is None or model.route is None:
            servers.append(None)
            continue
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


def folder_of(args: DerivedArguments, model: RewardModel, with_weights: bool) -> str:
    """Return the folder of a model of the ranks; that of a hub is downloaded, its weights only where they are used."""
    folder: str = safe_snapshot_download(
        model.typed, download_model=with_weights, use_hf=args.use_hf, hub_token=args.hub_token
    )
    return folder
