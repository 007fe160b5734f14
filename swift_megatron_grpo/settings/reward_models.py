"""Reward models: in the ranks, or behind servers as classifiers or as judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from swift_megatron_grpo.settings.flag import Above, Faults, Flags, flag, rule

DEFAULT_PLUGIN = "default"  # ms-swift's, of models that return one number
CLASSIFY, POOLING, JUDGE = ROUTES = ("/classify", "/pooling", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class RewardModel:
    """One value of --reward_model, and its plugin."""

    typed: str
    plugin: str
    type: str | None = None  # ms-swift's types, of a model in the ranks; None: it finds them out
    template: str | None = None

    @property
    def address(self) -> str | None:
        """The address of its server, with the route; None: it is not behind a server."""
        return self.typed.strip().rstrip("/") if "://" in self.typed else None

    @property
    def route(self) -> str | None:
        """The route of its server; None: there is no server, or no route of those that can be called."""
        return next((route for route in ROUTES if self.address is not None and self.address.endswith(route)), None)

    @property
    def is_judge(self) -> bool:
        return self.route == JUDGE

    @property
    def name(self) -> str:
        """Its name in logs: the last part of a path as in ms-swift; of a judge its plugin."""
        if self.address is None:
            return self.typed.rstrip("/").rpartition("/")[2]
        return "reward_model" if self.plugin == DEFAULT_PLUGIN else self.plugin


class RewardModels(Flags):
    """The models that grade, in the order of --reward_weights after the functions."""

    reward_model: list[str] | None
    reward_model_plugin: list[str] | None
    reward_model_type: list[str] | None = flag(
        None,
        "The type of each model of --reward_model in the ranks, as --model_type. Default: found out from its files.",
        example="qwen3",
    )
    reward_template: list[str] | None = flag(
        None,
        "The chat template of each model of --reward_model in the ranks, as --template. Default: that of its type.",
        example="qwen3",
    )
    reward_adapters: list[str] | None = flag(
        None,
        "Folders of LoRA adapters for the model of --reward_model in the ranks, the only one then. Default: none.",
        example="output/run/checkpoint-500",
    )
    reward_model_timeout: Annotated[float, Above(0, use=300)] = flag(
        300.0,
        "Time limit in seconds for the server of a reward model (--reward_model http://...) to score one completion. A "
        "request that fails is repeated until then. After it, the run ends, or with --bad_reward drop continues "
        "without this completion. Default: 300.",
        example="60",
    )

    @property
    def all(self) -> list[RewardModel]:
        models = self.reward_model or []
        plugins = self.reward_model_plugin or [DEFAULT_PLUGIN] * len(models)
        unknown = [None] * len(models)
        types, templates = self.reward_model_type or unknown, self.reward_template or unknown
        return list(map(RewardModel, models, plugins, types, templates))

    @rule
    def each_model_has_its_own_settings(self) -> Faults:
        count = len(self.reward_model or [])
        for name in ("reward_model_plugin", "reward_model_type", "reward_template"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                yield (
                    f"--{name} has {len(values)} values for the {count} of --reward_model; use one for each, or leave "
                    "it out"
                )

    @rule
    def adapters_have_one_model(self) -> Faults:
        typed, models = f"--reward_adapters {' '.join(self.reward_adapters or [])}", self.all
        if self.reward_adapters and len(models) != 1:
            yield (
                f"{typed} are for one --reward_model, and there are {len(models)}; merge each into its model (swift "
                "export), or leave them out"
            )
        elif self.reward_adapters and models[0].address is not None:
            yield f"{typed}: a server has its own adapters; leave them out"

    @rule
    def servers_have_routes(self) -> Faults:
        for model in self.all:
            typed = f"--reward_model {model.typed}"
            if model.address is None:
                continue
            if urlsplit(model.address).scheme not in ("http", "https") or not urlsplit(model.address).hostname:
                yield f"{typed} is not the address of a server; use the form http://HOST:8000{CLASSIFY}"
            elif model.route is None:
                yield f"{typed} has no route; append {CLASSIFY} or {POOLING} of a classifier, or {JUDGE} of a judge"
            elif model.is_judge and model.plugin == DEFAULT_PLUGIN:
                yield (
                    f"{typed}: a judge needs a plugin, which makes its request and reads its answer; use "
                    "--reward_model_plugin with a name that a file of --external_plugins adds to rm_plugins"
                )
            elif not model.is_judge and model.plugin != DEFAULT_PLUGIN:
                yield (
                    f"--reward_model_plugin {model.plugin} with {typed}: a classifier's server returns the score "
                    f"itself; use --reward_model_plugin {DEFAULT_PLUGIN}, or the route {JUDGE}"
                )
