"""Contradictory flags of the algorithm are refused at start, with the values to set instead."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.grading.advantages import BASELINES
from swift_megatron_grpo.settings.algorithm import ESTIMATORS, Algorithm, defaults_of
from swift_megatron_grpo.settings.losses import CLIPS_RATIO, Correction, Fipo, Kl, LossConfig, Sapo, Vespo
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.run import Checkpoints
from swift_megatron_grpo.training.loss import LOSSES
from tests.unit.arguments.test_grpo_arguments import model, refuse, typed  # noqa: F401  (fixtures)
from tests.unit.settings.flags import faults, of

REAL = {"loss_type": "real", "micro_batch_size": 8}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "loss": ({"loss_type": "ppo"}, ["--loss_type ppo: unknown value", "use --loss_type grpo or bnpo"]),
    "estimator": ({"advantage_estimator": "gae"}, ["--advantage_estimator gae: unknown value", "or rloo"]),
    "scale": ({"scale_rewards": "half"}, ["--scale_rewards half: unknown value", "group or batch or none or gdpo"]),
    "level": ({"importance_sampling_level": "word"}, ["--importance_sampling_level word: unknown value"]),
    "mode": ({"rollout_importance_sampling_mode": "x"}, ["--rollout_importance_sampling_mode x: unknown value"]),
    "k4": ({"kl_estimator": "k4"}, ["--kl_estimator k4: unknown value; use --kl_estimator k1 or abs or k2 or k3"]),
    "quantile 0": ({"top_entropy_quantile": 0.0}, ["--top_entropy_quantile 0 must be above 0 and at most 1"]),
    "quantile 20": ({"top_entropy_quantile": 20.0}, ["--top_entropy_quantile 20", "use --top_entropy_quantile 0.2"]),
    "threshold": ({"rollout_importance_sampling_threshold": 0.0}, ["--rollout_importance_sampling_threshold 0 "]),
    "tau": ({"loss_type": "sapo", "tau_pos": 0.0}, ["--tau_pos 0 must be above 0"]),
    "epsilon": ({"epsilon": -0.1}, ["--epsilon -0.1 must be at least 0"]),
    "one completion": (
        {"num_generations": 1},
        ["num_generations (1) must be at least 2", "--advantage_estimator reinforce_plus_plus_plain"],
    ),
    "one completion, rloo": ({"num_generations": 1, "advantage_estimator": "rloo"}, ["use --num_generations 8"]),
    "plain by group": (
        {"advantage_estimator": "reinforce_plus_plus_plain", "scale_rewards": "group"},
        ["--scale_rewards group has no meaning", "use --scale_rewards batch or none"],
    ),
    "gdpo rloo": (
        {"scale_rewards": "gdpo", "advantage_estimator": "rloo", "kl_in_reward": False},
        ["--advantage_estimator rloo would have no effect", "use --advantage_estimator grpo"],
    ),
    "gdpo kl": ({"scale_rewards": "gdpo", "kl_in_reward": True}, ["--scale_rewards gdpo", "use --kl_in_reward false"]),
    "kl target": ({"kl_target": 0.1, "beta": 0.0}, ["--kl_target", "--beta 0", "use --beta 0.04"]),
    "kl target 0": ({"kl_target": 0.0}, ["--kl_target 0 must be above 0"]),
    "delta": ({"delta": 1.1}, ["--delta 1.1 must be above 1 + epsilon_high = 1.2"]),
    "dual": ({"dual_clip": 1.3, "epsilon_high": 0.4}, ["--dual_clip 1.3 must be above 1 + epsilon_high = 1.4"]),
    "both": ({"dual_clip": 3.0, "delta": 3.0}, ["--delta and --dual_clip bound the same tokens"]),
    "delta cispo": ({"loss_type": "cispo", "delta": 3.0}, ["--loss_type cispo does not clip ratios; leave it out"]),
    "vespo mode": (
        {"loss_type": "vespo", "rollout_importance_sampling_mode": "token_mask"},
        ["weights whole completions", "use --old_logprobs engine"],
    ),
    "vespo level": (
        {"loss_type": "vespo", "importance_sampling_level": "sequence"},
        ["--importance_sampling_level sequence has no effect on --loss_type vespo", "leave it out"],
    ),
    "real splits": ({"loss_type": "real"}, ["micro_batch_size (1) splits groups", "use --micro_batch_size 8"]),
    "real splits 12": ({"loss_type": "real", "micro_batch_size": 12}, ["use --micro_batch_size 16"]),
    "real budget": ({**REAL, "max_tokens_per_micro_batch": 4096}, ["--max_tokens_per_micro_batch", "leave it out"]),
    "real level": ({**REAL, "importance_sampling_level": "sequence"}, ["--importance_sampling_level sequence"]),
    "real quantile": (
        {**REAL, "top_entropy_quantile": 0.2},
        ["--top_entropy_quantile 0.2", "scores whole completions"],
    ),
    "real moment": ({**REAL, "m2_threshold": 0.04}, ["--m2_threshold 0.04", "scores whole completions"]),
    "no moment": ({"m2_threshold": 0.0}, ["--m2_threshold 0 must be above 0", "use --m2_threshold 0.04"]),
    "real weights": (
        {**REAL, "rollout_importance_sampling_mode": "token_mask"},
        ["applies to single tokens"],
    ),
    "maxrl scaled": ({"advantage_estimator": "maxrl", "scale_rewards": "group"}, ["use --scale_rewards none"]),
    "maxrl with a penalty": (
        {"advantage_estimator": "maxrl", "kl_in_reward": True, "beta": 0.1},
        ["use --kl_in_reward false"],
    ),
    "token baseline scaled": (
        {"advantage_estimator": "optimal_token_baseline", "scale_rewards": "batch"},
        ["--scale_rewards batch would not scale advantages", "use --scale_rewards none"],
    ),
    "token baseline with a penalty": (
        {"advantage_estimator": "optimal_token_baseline", "kl_in_reward": True, "beta": 0.1},
        ["use --kl_in_reward false"],
    ),
    "real token baseline": (
        {**REAL, "advantage_estimator": "optimal_token_baseline"},
        ["gives every token an advantage of its own", "use --loss_type grpo"],
    ),
    "masked token baseline": (
        {"advantage_estimator": "optimal_token_baseline", "off_policy_sequence_mask_delta": 0.5},
        ["gives every token an advantage of its own", "leave one of them out"],
    ),
    "real plain": ({**REAL, "advantage_estimator": "reinforce_plus_plus_plain"}, ["--loss_type real needs groups"]),
    "engine": (
        {"old_logprobs": "engine", "rollout_importance_sampling_mode": "token_mask"},
        ["--old_logprobs engine both are the same", "use --old_logprobs policy, or leave the mode out"],
    ),
    "old": ({"old_logprobs": "vllm"}, ["use --old_logprobs policy or engine"]),
    "resample 0": ({"dynamic_sample": True, "max_resample_times": 0}, ["never samples again"]),
    "spare": ({"spare_groups": "-1"}, ["--spare_groups -1 must be auto or a number", "use --spare_groups auto"]),
    "spare text": ({"dynamic_sample": True, "spare_groups": "all"}, ["--spare_groups all must be auto or a number"]),
    "resample one": (
        {"dynamic_sample": True, "num_generations": 1, "advantage_estimator": "reinforce_plus_plus_plain"},
        ["--dynamic_sample keeps prompts", "--dynamic_sample false"],
    ),
}
ACCEPTED: list[dict[str, Any]] = [
    {},
    *({"loss_type": name, "micro_batch_size": 8} for name in LOSSES),
    *({"advantage_estimator": name} for name in ESTIMATORS),
    {"advantage_estimator": "reinforce_plus_plus_plain", "num_generations": 1},
    {"scale_rewards": "gdpo"},
    {"scale_rewards": "gdpo", "kl_in_reward": True, "beta": 0.0},
    {"dynamic_sample": True},
    {"dynamic_sample": True, "spare_groups": "auto"},
    {"dynamic_sample": True, "spare_groups": "16"},
    {"old_logprobs": "engine", "off_policy_sequence_mask_delta": 0.5},
    {"m2_threshold": 0.04, "rollout_importance_sampling_mode": "token_truncate"},
    {"delta": 2.0},
    # the teacher alone: this estimator leaves the KL out of rewards unless it is told otherwise
    {"advantage_estimator": "maxrl", "num_generations": 1, "teacher_model": "large", "reward_funcs": [], "beta": 0.1},
    {"dual_clip": 3.0, "loss_type": "dapo"},
    {"kl_target": 0.01},
    {**REAL, "off_policy_sequence_mask_delta": 0.1},
]


def faults_of(typed: dict[str, Any]) -> str:  # noqa: F811
    groups = (Algorithm, LossConfig, Sapo, Vespo, Fipo, Correction, Kl)
    return "\n".join(filter(None, (faults(group, **typed) for group in groups)))


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_with_the_values_to_set(name: str) -> None:
    changes, parts = REFUSED[name]
    message = faults_of(changes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_valid_combinations_are_accepted(changes: dict[str, Any]) -> None:
    assert faults_of(changes) == ""


def test_the_choices_are_those_of_losses_and_estimators() -> None:
    assert set(CLIPS_RATIO) == set(LOSSES) and set(ESTIMATORS) == set(BASELINES)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_defaults_of_an_estimator_equal_ms_swifts(estimator: str) -> None:
    import inspect

    from swift.megatron.arguments.megatron_args import RLHFMegatronArgumentsMixin

    source = inspect.getsource(RLHFMegatronArgumentsMixin._init_grpo)
    branches = source.split("if self.scale_rewards is None:")[1].split("self.advantage_estimator == ")[1:]
    scale = next(b.split("self.scale_rewards = '")[1].split("'")[0] for b in branches if b.startswith(f"'{estimator}'"))
    assert defaults_of(estimator) == {"scale_rewards": scale, "kl_in_reward": estimator != "grpo"}


def test_flags_without_effect_are_named_in_the_log() -> None:
    def notes(**changes: Any) -> list[str]:
        return of(Algorithm, **changes).notes()

    assert notes() == []
    assert notes(loss_type="sapo", tau_pos=2.0) == []
    assert "--tau_pos: for --loss_type sapo, without effect on --loss_type grpo" in notes(tau_pos=2.0)[0]
    assert "--epsilon_high has no effect on --loss_type sapo" in notes(loss_type="sapo", epsilon_high=0.3)[0]
    assert "--epsilon_high 5 is common" in notes(loss_type="cispo")[0]
    assert notes(loss_type="cispo", epsilon_high=5.0) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"advantage_estimator": "optimal_token_baseline"}, "--advantage_estimator optimal_token_baseline"),
        ({"top_entropy_quantile": 0.2, "loss_type": "sapo"}, "--top_entropy_quantile 0.2"),
        ({"m2_threshold": 0.04}, "--m2_threshold 0.04"),
        ({"loss_type": "fipo"}, "--loss_type fipo"),
        ({"teacher_model": "large"}, "the teacher large"),
    ],
)
def test_what_one_ratio_of_a_completion_averages_is_noted(changes: dict[str, Any], name: str) -> None:
    [note] = of(Algorithm, importance_sampling_level="sequence", **changes).notes()
    assert note.startswith(f"{name}: --importance_sampling_level sequence gives all tokens")
    assert of(Algorithm, importance_sampling_level="sequence_token", **changes).notes() == []
    assert of(Algorithm, importance_sampling_level="token", **changes).notes() == []


def test_a_function_counts_once_and_is_listed_once() -> None:
    assert "--reward_funcs format: it is listed 2 times" in faults(Rewards, reward_funcs=["format", "a", "format"])
    assert faults(Rewards, reward_funcs=["format", "accuracy"]) == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"finetune": False}, "--finetune false continues from a checkpoint, and there is none"),
        ({"finetune": False, "mcore_model": "x"}, ""),
        ({"finetune": False, "mcore_adapter": "x"}, ""),
        ({"async_save": True, "save_total_limit": 2}, "--save_total_limit 2 with --async_save true"),
        ({"async_save": True}, ""),
    ],
)
def test_checkpoints_that_are_loaded_exist_and_those_saved_can_be_removed(flags: dict[str, Any], message: str) -> None:
    found = faults(Checkpoints, **flags)
    assert message in found and bool(found) == bool(message)


def test_a_command_line_with_a_contradiction_is_refused(typed: dict[str, Any]) -> None:  # noqa: F811
    assert "--scale_rewards gdpo" in refuse(typed, scale_rewards="gdpo", kl_in_reward=True)
    assert "--loss_type real compares" in refuse(typed, loss_type="real")
    assert "no reward function is set" in refuse(typed, dynamic_sample=True, reward_funcs=[])
