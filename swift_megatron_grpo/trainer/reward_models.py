"""Reward models in the training processes: every rank has all of each, and grades its share of completions with it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from swift.model import get_model_processor
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.template import get_template
from swift.tuners import Swift
from swift.utils import get_logger

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.reward_models import folder_of
from swift_megatron_grpo.generation.protocol.model_identity import read_model_config
from swift_megatron_grpo.grading.reward_servers import RewardServer
from swift_megatron_grpo.grading.rewards import rows_of
from swift_megatron_grpo.settings.reward_models import RewardModel, RewardModels

logger = get_logger()

_ROWS_AT_ONCE = 8  # of ms-swift's own plugin, which would pad all completions of a rank to one batch


@dataclass(frozen=True, slots=True)
class LocalRewardModel:
    """Called like a reward function. The plugin is one of ms-swift, or like them."""

    plugin: Callable[..., Any]

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[Any]:
        rows = rows_of(columns, len(completions))
        if type(self.plugin) is DefaultRMPlugin:
            starts = range(0, len(rows), _ROWS_AT_ONCE)
            return [score for start in starts for score in self._scores(rows[start : start + _ROWS_AT_ONCE], {})]
        return self._scores(rows, columns if _takes_columns(self.plugin) else {})

    def _scores(self, rows: list[dict[str, Any]], columns: dict[str, Any]) -> list[Any]:
        scores = self.plugin(inputs=rows, **columns)
        return scores.tolist() if isinstance(scores, torch.Tensor) else list(scores)


def create_reward_models(args: GRPOArguments, servers: Sequence[RewardServer | None]) -> list[Callable[..., Any]]:
    """Return the functions of --reward_model, in its order: the servers, and where there is none a loaded model."""
    models = args.of(RewardModels).all
    return [server or _loaded(args, model) for server, model in zip(servers, models, strict=True)]


def _loaded(args: GRPOArguments, model: RewardModel) -> LocalRewardModel:
    logger.info(f"--reward_model {model.typed}: every rank loads it")
    try:
        return load_reward_model(args, model)
    except Exception as error:
        raise ValueError(
            f"--reward_model {model.typed} with --reward_model_plugin {model.plugin}: loading it raises "
            f"{type(error).__name__}: {error}; use --reward_model_type or --reward_template if ms-swift does not find "
            "them out, or the address of a server of this model"
        ) from error


def load_reward_model(args: GRPOArguments, model: RewardModel) -> LocalRewardModel:
    """Load a classifier or a generative model as ms-swift does for its other trainer, in the precision of training."""
    folder = folder_of(args, model, with_weights=True)
    same_type = read_model_config(folder)["model_type"] == args.model_config["model_type"]
    task_type, num_labels = SwiftRLHF._get_model_task_type(folder)
    device = torch.cuda.current_device()
    loaded, processor = get_model_processor(
        folder,
        torch_dtype=args.torch_dtype,
        device_map="cpu" if torch.version.cuda is None else f"cuda:{device}",  # no copy of each rank in host memory
        model_type=model.type or (args.model_type if same_type else None),
        task_type=task_type,
        num_labels=num_labels,
    )
    for adapter in args.of(RewardModels).reward_adapters or []:
        loaded = Swift.from_pretrained(loaded, adapter)
    loaded.requires_grad_(False).eval().to(device)
    # Settings of the policy's template as in ms-swift, but for a padded batch, and prompts that have been cut by now.
    own = {"template_type": model.template or processor.model_meta.template, "padding_free": False, "max_length": None}
    template = get_template(processor, **(args.get_template_kwargs() | own))
    template.set_mode("train")
    if template.use_model:
        template.model = loaded
    return LocalRewardModel(rm_plugins[model.plugin](model=loaded, template=template))


def _takes_columns(plugin: Callable[..., Any]) -> bool:
    parameters = inspect.signature(plugin).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
