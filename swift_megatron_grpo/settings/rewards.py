"""Rewards: their weights, the length penalty, and who grades."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, flag, rule
from swift_megatron_grpo.settings.reward_models import RewardModels
from swift_megatron_grpo.settings.servers import Servers

BadRewardPolicy = Literal["stop", "drop"]


class Rewards(Flags):
    """Reward functions and weights; grading reads them. Their names are checked against ms-swift's registry."""

    bad_reward: BadRewardPolicy = flag(
        "stop",
        "What to do when a completion has no valid reward: every reward function returned None, or one returned NaN or "
        "infinity, or raised an exception. stop: the run ends with an error that names the function and the "
        "completion. drop: the completion is excluded from its group's statistics and is not trained; a function that "
        "raises excludes all completions of that call. Default: stop.",
    )
    reward_weights: list[float] | None
    soft_cache_length: Annotated[int | None, AtLeast(1, use=128, why="soft_overlong divides by it")]
    soft_max_length: Annotated[int | None, AtLeast(2, use=1024)]
    max_completion_length: int
    models: RewardModels
    servers: Servers

    @property
    def by_environment(self) -> bool:
        """True if the environment's total reward is added to those of reward functions, as in ms-swift."""
        typed = self.servers.use_gym_env
        return self.servers.gym_env is not None if typed is None else typed

    @property
    def by_servers(self) -> bool:
        """True if the servers' flags decide whether environments grade: as in ms-swift, without --use_gym_env here."""
        return self.servers.turns is not None and self.servers.use_gym_env is None and self.servers.gym_env is None

    @rule
    def soft_overlong_has_its_length(self) -> Faults:
        longest, cache = self.soft_max_length or self.max_completion_length, self.soft_cache_length
        if not self.by_servers and "soft_overlong" in self.servers.reward_funcs and (cache is None or cache >= longest):
            fault = "is not set" if cache is None else f"{cache} is not below the longest completion, {longest}"
            yield (
                f"--soft_cache_length {fault}: --reward_funcs soft_overlong penalises the last tokens before the "
                f"limit; use --soft_cache_length {max(1, longest // 4)}"
            )

    @rule
    def each_function_is_listed_once(self) -> Faults:
        names = self.servers.reward_funcs
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield (
                f"--reward_funcs {name}: it is listed {names.count(name)} times, so its reward would count as often; "
                "list every function once, and use --reward_weights for its share"
            )

    @rule
    def there_is_a_weight_for_each_function(self) -> Faults:
        weights, functions = self.reward_weights, len(self.servers.reward_funcs) + len(self.models.all)
        if weights is None or self.by_servers:
            return
        typed = f"--reward_weights {' '.join(f'{weight:g}' for weight in weights)}"
        advice = f"use --reward_weights {' '.join('1' for _ in weights)}, or leave it out"
        functions += self.by_environment
        if len(weights) != functions:
            yield (
                f"reward_weights has {len(weights)} values for {functions} reward functions and models; set "
                "--reward_weights to one value for each, or leave it out"
            )
        elif not all(map(math.isfinite, weights)):
            yield f"{typed}: weights must be finite numbers; {advice}"
        elif not any(weights):
            yield f"{typed}: every reward would be 0, so nothing would be trained; {advice}"
