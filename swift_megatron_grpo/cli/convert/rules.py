"""Rules that the tables of several trainers share."""

from typing import Any

from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    NoCounterpart,
)

OWN = Needless("chosen by this trainer")
CRITIC = Needless("GRPO has no critic")
BALANCED = Needless("every data-parallel rank gets the same work")
REWARD_MODEL = "--reward_model with the model, or with the address of its server: docs/reward_models.md"
REWARD_CLASS = ByHand("write a reward class (docs of ms-swift: ORM), --external_plugins and --reward_funcs")
RESUME = ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER")
TURNS = ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns")


def clip(both: Any = 0.2, low: Any = None, high: Any = None) -> Flags:
    """Return the bounds of the clip; `both` counts where one is not set. Without its flag the upper is the lower."""
    low, high = (both if bound is None else bound for bound in (low, high))
    return {"epsilon": low} | ({} if high == low else {"epsilon_high": high})


def batch_sizes(group: int, step: int, rollout: int) -> Flags:
    sizes = {"num_generations": group, "global_batch_size": step}
    return sizes if rollout == step else sizes | {"generation_batch_size": rollout}


def micro_batches(dynamic: Any = False, tokens: Any = None, count: Any = None) -> Flags:
    return {"max_tokens_per_micro_batch": tokens} if dynamic else {"micro_batch_size": count}


def kl(in_loss: Any = False, in_reward: Any = False, of_loss: Any = 0, of_reward: Any = 0) -> Flags:
    loss, reward = in_loss and of_loss, in_reward and of_reward
    if loss and reward:
        raise NoCounterpart("the KL term is in the loss or in the reward here, not in both")
    return {"beta": loss or reward or 0, "kl_in_reward": bool(reward)}


def _targets(value: Any) -> Flags:
    names = value if isinstance(value, list) else str(value).split(",")
    if not {*names} <= {"all-linear", "all"}:
        raise NoCounterpart("all linear layers get adapters; --target_modules has the names of docs/lora.md")
    return {}


TARGETS = Computed(["target_modules"], _targets)


def adapter(rank: Any = None, alpha: Any = None, dropout: Any = None, nested_rank: Any = None,
            nested_alpha: Any = None, on: Any = True) -> Flags:  # fmt: skip
    if not (on and (rank or nested_rank)):
        return {"tuner_type": "full"}
    sizes = {"lora_rank": rank or nested_rank, "lora_alpha": alpha or nested_alpha, "lora_dropout": dropout}
    return {"tuner_type": "lora", **sizes, "target_modules": "all-linear"}
